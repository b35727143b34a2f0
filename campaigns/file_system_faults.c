/* Hurts the k-th change of the file system below a folder: LD_PRELOAD. Armed by fault_arm() from inside the process.
   mode 0: only count. 1: SIGKILL on entry, a write torn in half. 2: fail with `err` once. 3: fail from then on.
   4: as 1, and what no fsync has reached is gone with it, as in a power cut: such files are empty, names stay. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
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
/* Files with bytes that may not be on the disk yet, by path. */
enum { MOST = 4096 };
static char *dirty[MOST];
static void note(int fd, int synced) {
  char link[64], full[4096] = "";
  struct stat about;
  if (mode != 4 || fstat(fd, &about) || !S_ISREG(about.st_mode)) return;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, full, sizeof full - 1) <= 0 || strncmp(full, folder, strlen(folder))) return;
  pthread_mutex_lock(&lock);
  int free_at = -1, at_i = -1;
  for (int i = 0; i < MOST; i++) {
    if (!dirty[i]) free_at = free_at < 0 ? i : free_at;
    else if (!strcmp(dirty[i], full)) at_i = i;
  }
  if (synced && at_i >= 0) free(dirty[at_i]), dirty[at_i] = NULL;
  if (!synced && at_i < 0 && free_at >= 0) dirty[free_at] = strdup(full);
  pthread_mutex_unlock(&lock);
}
static void full_path(int dir, const char *path, char *out, size_t n) {
  char link[64], base[4096] = "";
  if (path[0] == '/' || dir == AT_FDCWD) { snprintf(out, n, "%s", path); return; }
  snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
  if (readlink(link, base, sizeof base - 1) > 0) snprintf(out, n, "%s/%s", base, path);
}
static void moved(int d, const char *a, int e, const char *b) {
  char from[8200] = "", to[8200] = "", next[8200];
  if (mode != 4) return;
  full_path(d, a, from, sizeof from), full_path(e, b, to, sizeof to);
  size_t n = strlen(from);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST; i++)
    if (dirty[i] && !strncmp(dirty[i], from, n) && (!dirty[i][n] || dirty[i][n] == '/')) {
      snprintf(next, sizeof next, "%s%s", to, dirty[i] + n);
      free(dirty[i]), dirty[i] = strdup(next);
    }
  pthread_mutex_unlock(&lock);
}
static void die(void) {
  if (mode == 4)
    for (int i = 0; i < MOST; i++)
      if (dirty[i]) truncate(dirty[i], 0);
  kill(getpid(), SIGKILL), pause();
}
/* 0: go on. 1: this one is hit by a kill. 2: fail. */
static int hit(void) {
  pthread_mutex_lock(&lock);
  long n = seen++;
  pthread_mutex_unlock(&lock);
  if ((mode == 1 || mode == 4) && n == at) return 1;
  if ((mode == 2 && n == at) || (mode == 3 && n >= at)) return 2;
  return 0;
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define GUARD(inside) \
  if (inside) { int h = hit(); if (h == 1) die(); if (h == 2) { errno = err; return -1; } }

int mkdir(const char *p, mode_t m) { REAL(mkdir); GUARD(below(AT_FDCWD, p)); return real(p, m); }
int mkdirat(int d, const char *p, mode_t m) { REAL(mkdirat); GUARD(below(d, p)); return real(d, p, m); }
int rename(const char *a, const char *b) {
  REAL(rename); GUARD(below(AT_FDCWD, b));
  int r = real(a, b);
  if (!r) moved(AT_FDCWD, a, AT_FDCWD, b);
  return r;
}
int renameat(int d, const char *a, int e, const char *b) {
  REAL(renameat); GUARD(below(e, b));
  int r = real(d, a, e, b);
  if (!r) moved(d, a, e, b);
  return r;
}
int unlink(const char *p) { REAL(unlink); GUARD(below(AT_FDCWD, p)); return real(p); }
int unlinkat(int d, const char *p, int f) { REAL(unlinkat); GUARD(below(d, p)); return real(d, p, f); }
int rmdir(const char *p) { REAL(rmdir); GUARD(below(AT_FDCWD, p)); return real(p); }
int fsync(int fd) {
  REAL(fsync); GUARD(fd_below(fd));
  int r = real(fd);
  if (!r) note(fd, 1);
  return r;
}
int fdatasync(int fd) {
  REAL(fdatasync); GUARD(fd_below(fd));
  int r = real(fd);
  if (!r) note(fd, 1);
  return r;
}
int ftruncate(int fd, off_t n) { REAL(ftruncate); GUARD(fd_below(fd)); return real(fd, n); }

ssize_t write(int fd, const void *b, size_t n) {
  REAL(write);
  if (fd > 2 && fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, b, n / 2), die();
    if (h == 2) { errno = err; return -1; }
  }
  note(fd, 0);
  return real(fd, b, n);
}
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) {
  REAL(pwrite);
  if (fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, b, n / 2, o), die();
    if (h == 2) { errno = err; return -1; }
  }
  note(fd, 0);
  return real(fd, b, n, o);
}
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) {
  REAL(pwrite64);
  if (fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, b, n / 2, o), die();
    if (h == 2) { errno = err; return -1; }
  }
  note(fd, 0);
  return real(fd, b, n, o);
}
ssize_t writev(int fd, const struct iovec *v, int n) {
  REAL(writev);
  if (fd > 2 && fd_below(fd)) {
    int h = hit();
    if (h == 1) real(fd, v, n > 1 ? n / 2 : 1), die();
    if (h == 2) { errno = err; return -1; }
  }
  note(fd, 0);
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
