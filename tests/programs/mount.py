"""A file system of FUSE over a folder that behaves as a mounted bucket: no directory can be renamed.

`python -m tests.programs.mount FOLDER MOUNT` serves until `fusermount -u MOUNT`.
"""

import errno
import os
import sys

import fuse  # fusepy, which needs libfuse 2


class Bucket(fuse.Operations):
    def __init__(self, folder: str):
        self.folder = folder

    def __call__(self, operation, path, *args):
        return super().__call__(operation, self.folder + path, *args)

    def getattr(self, path, handle=None):
        try:
            found = os.lstat(path)
        except OSError as error:
            raise fuse.FuseOSError(error.errno) from None
        return {name: getattr(found, name) for name in dir(found) if name.startswith("st_") and name != "st_blocks"}

    def rename(self, path, new):
        if os.path.isdir(path):
            raise fuse.FuseOSError(errno.ENOTSUP)
        os.rename(path, self.folder + new)

    def readdir(self, path, handle):
        return [".", "..", *os.listdir(path)]

    def create(self, path, mode, info=None):
        return os.open(path, os.O_RDWR | os.O_CREAT, mode)

    def open(self, path, flags):
        return os.open(path, flags)

    def read(self, path, size, at, handle):
        return os.pread(handle, size, at)

    def write(self, path, data, at, handle):
        return os.pwrite(handle, data, at)

    def truncate(self, path, size, handle=None):
        os.truncate(path, size)

    def fsync(self, path, only_data, handle):
        os.fsync(handle)

    def release(self, path, handle):
        os.close(handle)

    def mkdir(self, path, mode):
        os.mkdir(path, mode)

    def rmdir(self, path):
        os.rmdir(path)

    def unlink(self, path):
        os.unlink(path)

    def chmod(self, path, mode):
        os.chmod(path, mode)

    def utimens(self, path, times=None):
        os.utime(path, times)


if __name__ == "__main__":
    fuse.FUSE(Bucket(sys.argv[1]), sys.argv[2], foreground=True)
