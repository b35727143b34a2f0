/* Hurts the k-th change of the file system below a folder: LD_PRELOAD. Armed by fault_arm() from inside the process.
   mode 0: only count. 1: SIGKILL on entry, a write torn in half. 2: fail with `err` once. 3: fail from then on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static long at, seen;
static int mode, err;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fault_arm(const char *where, long k, int how, int error) {
  strncpy(folder, where, sizeof folder - 1);
  at = k, mode = how, err = error, seen = 0;
}
long fault_seen(void) { return seen; }

static int below(int dir, const char *path) {
  char full[4200] = "", base[4096] = "";
  if (!folder[0] || !path) return 0;
  if (path[0] == '/') return !strncmp(path, folder, strlen(folder));
  if (dir == AT_FDCWD) return 0;
  snprintf(full, sizeof full, "/proc/self/fd/%d", dir);
  ssize_t n = readlink(full, base, sizeof base - 1);
  return n > 0 && !strncmp(base, folder, strlen(folder));
}
static int fd_below(int fd) {
  char link[64], full[4096] = "";
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, full, sizeof full - 1);
  return n > 0 && !strncmp(full, folder, strlen(folder));
}
/* 0: go on. 1: this one is hit by a kill. 2: fail. */
static int hit(void) {
  pthread_mutex_lock(&lock);
  long n = seen++;
  pthread_mutex_unlock(&lock);
  if (mode == 1 && n == at) return 1;
  if ((mode == 2 && n == at) || (mode == 3 && n >= at)) return 2;
  return 0;
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define GUARD(inside) \
  if (inside) { int h = hit(); if (h == 1) kill(getpid(), SIGKILL), pause(); if (h == 2) { errno = err; return -1; } }

int mkdir(const char *p, mode_t m) { REAL(mkdir); GUARD(below(AT_FDCWD, p)); return real(p, m); }
int mkdirat(int d, const char *p, mode_t m) { REAL(mkdirat); GUARD(below(d, p)); return real(d, p, m); }
int rename(const char *a, const char *b) { REAL(rename); GUARD(below(AT_FDCWD, b)); return real(a, b); }
int renameat(int d, const char *a, int e, const char *b) { REAL(renameat); GUARD(below(e, b)); return real(d, a, e, b); }
int unlink(const char *p) { REAL(unlink); GUARD(below(AT_FDCWD, p)); return real(p); }
int unlinkat(int d, const char *p, int f) { REAL(unlinkat); GUARD(below(d, p)); return real(d, p, f); }
int rmdir(const char *p) { REAL(rmdir); GUARD(below(AT_FDCWD, p)); return real(p); }
int fsync(int fd) { REAL(fsync); GUARD(fd_below(fd)); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); GUARD(fd_below(fd)); return real(fd); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); GUARD(fd_below(fd)); return real(fd, n); }

ssize_t write(int fd, const void *b, size_t n) {
  REAL(write);
  if (fd > 2 && fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, b, n / 2), kill(getpid(), SIGKILL), pause();
    if (h == 2) { errno = err; return -1; }
  }
  return real(fd, b, n);
}
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) {
  REAL(pwrite);
  if (fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, b, n / 2, o), kill(getpid(), SIGKILL), pause();
    if (h == 2) { errno = err; return -1; }
  }
  return real(fd, b, n, o);
}
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) {
  REAL(pwrite64);
  if (fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, b, n / 2, o), kill(getpid(), SIGKILL), pause();
    if (h == 2) { errno = err; return -1; }
  }
  return real(fd, b, n, o);
}
ssize_t writev(int fd, const struct iovec *v, int n) {
  REAL(writev);
  if (fd > 2 && fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, v, n > 1 ? n / 2 : 1), kill(getpid(), SIGKILL), pause();
    if (h == 2) { errno = err; return -1; }
  }
  return real(fd, v, n);
}
#define OPEN(name)                                                          \
  int name(const char *p, int flags, ...) {                                 \
    static int (*real)(const char *, int, ...);                             \
    if (!real) real = dlsym(RTLD_NEXT, #name);                              \
    va_list a; va_start(a, flags); mode_t m = va_arg(a, mode_t); va_end(a); \
    if (flags & (O_CREAT | O_TRUNC)) GUARD(below(AT_FDCWD, p));             \
    return real(p, flags, m);                                               \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                        \
  int name(int d, const char *p, int flags, ...) {                          \
    static int (*real)(int, const char *, int, ...);                        \
    if (!real) real = dlsym(RTLD_NEXT, #name);                              \
    va_list a; va_start(a, flags); mode_t m = va_arg(a, mode_t); va_end(a); \
    if (flags & (O_CREAT | O_TRUNC)) GUARD(below(d, p));                    \
    return real(d, p, flags, m);                                            \
  }
OPENAT(openat)
OPENAT(openat64)
