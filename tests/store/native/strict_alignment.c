// Preloaded by a test: direct transfers that are not aligned to 64 KiB fail with EINVAL when they are made, as on
// a file system that takes O_DIRECT when a file is opened and wants more than the store gives. Reads of
// io_uring are refused by giving their entries an unknown operation; with STRICT_ALIGNMENT=ring only they are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { kAlignment = 65536, kEntryBytes = 64, kMostRings = 16 };

static struct {
  unsigned char* entries;
  size_t size;
} rings[kMostRings];
static int ring_count;

static int IsRefused(int fd, uint64_t address, uint64_t size, uint64_t offset) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0 && (address | size | offset) % kAlignment != 0;
}

static int IsRefusedToCalls(int fd, uint64_t address, uint64_t size, uint64_t offset) {
  const char* const which = getenv("STRICT_ALIGNMENT");
  return (which == NULL || strcmp(which, "ring") != 0) && IsRefused(fd, address, size, offset);
}

ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  if (IsRefusedToCalls(fd, (uint64_t)data, size, (uint64_t)offset)) {
    errno = EINVAL;
    return -1;
  }
  return syscall(SYS_pread64, fd, data, size, offset);
}
ssize_t pread64(int fd, void* data, size_t size, off_t offset) { return pread(fd, data, size, offset); }

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (IsRefusedToCalls(fd, (uint64_t)data, size, (uint64_t)offset)) {
    errno = EINVAL;
    return -1;
  }
  return syscall(SYS_pwrite64, fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off_t offset) {
  return pwrite(fd, data, size, offset);
}

void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  void* const at = (void*)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
  if (fd >= 0 && offset == 0x10000000 && at != MAP_FAILED && ring_count < kMostRings) {
    rings[ring_count].entries = at;
    rings[ring_count++].size = size;
  }
  return at;
}
void* mmap64(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  return mmap(address, size, protection, flags, fd, offset);
}

long syscall(long number, ...) {
  static long (*next)(long, ...);
  if (next == NULL) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  for (int ring = 0; number == 426 && ring < ring_count; ++ring) {
    for (size_t at = 0; at < rings[ring].size; at += kEntryBytes) {
      unsigned char* const entry = rings[ring].entries + at;
      int32_t fd;
      uint64_t offset, address;
      uint32_t size;
      memcpy(&fd, entry + 4, 4);
      memcpy(&offset, entry + 8, 8);
      memcpy(&address, entry + 16, 8);
      memcpy(&size, entry + 24, 4);
      if (entry[0] != 0 && IsRefused(fd, address, size, offset)) entry[0] = 250;
    }
  }
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
