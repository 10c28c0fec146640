/* Faults of a node's clock, disk and kernel limits, preloaded into the daemons of a soak (see node_faults.py).
 *
 * The faults are in a page that all preloaded processes share: the file that NODE_FAULTS names. Nothing outside those
 * processes is affected. An offset applies to the wall clock alone: CLOCK_BOOTTIME is the clock of the start times in
 * /proc, which are not offset, and every process would look older than a moment that has just passed.
 * Disk faults apply to files below `directory`, but not to logs, which a node's own log service stores. A full disk has
 * `room` bytes left: growth uses them, truncation returns them. inotify fails as at its limits.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct faults {
    _Atomic int64_t wall_ns;    /* offset */
    _Atomic int64_t disk_error; /* errno of every write; 0: none */
    _Atomic int64_t room;       /* bytes; negative: no limit */
    _Atomic int64_t no_inotify;
    char directory[256];
};

static struct faults none = {.room = -1}, *faults = &none;

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void find_the_page(void)
{
    const char *path = getenv("NODE_FAULTS");
    int fd = path ? REAL(open64, int (*)(const char *, int, ...))(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED)
        faults = page;
    close(fd);
}

/* -- clocks ------------------------------------------------------------------------------------------------------- */

static int64_t offset_of(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ? faults->wall_ns : 0;
}

static void shift(struct timespec *at, int64_t by)
{
    int64_t ns = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + by;
    at->tv_sec = ns / 1000000000;
    at->tv_nsec = ns % 1000000000;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = REAL(clock_gettime, int (*)(clockid_t, struct timespec *));
    int result = real(clock, at);
    if (result == 0)
        shift(at, offset_of(clock));
    return result;
}

int gettimeofday(struct timeval *at, void *zone)
{
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

/* The kernel does not know the offset: a wait until a time of day is translated, or it would last for hours. */
long syscall(long number, ...)
{
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    struct timespec until;
    if (number == SYS_futex && a[3] && (a[1] & FUTEX_CLOCK_REALTIME) && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
        until = *(const struct timespec *)a[3];
        shift(&until, -offset_of(CLOCK_REALTIME));
        a[3] = (long)&until;
    }
    return REAL(syscall, long (*)(long, ...))(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* -- the disk ----------------------------------------------------------------------------------------------------- */

static int is_faulty(void) { return faults->disk_error != 0 || faults->room >= 0; }

static int is_below(const char *path)
{
    size_t length = strlen(faults->directory), all = strlen(path);
    if (all > 4 && strcmp(path + all - 4, ".log") == 0)
        return 0;
    return length && strncmp(path, faults->directory, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int is_on_the_disk(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_below(path);
}

static int64_t size_of(int fd)
{
    struct stat found;
    return fstat(fd, &found) == 0 ? found.st_size : 0;
}

/* Return 0, or the errno of a change after which the file of `fd` ends at `end`. */
static int refuse(int fd, int64_t end)
{
    if (!is_faulty() || !is_on_the_disk(fd))
        return 0;
    if (faults->disk_error)
        return (int)faults->disk_error;
    int64_t growth = end - size_of(fd);
    if (faults->room < 0 || growth <= 0)
        return 0;
    if (growth > faults->room)
        return ENOSPC;
    faults->room -= growth;
    return 0;
}

#define FAIL(error) return errno = (error), -1

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t at)
{
    int error = refuse(fd, at + (int64_t)count);
    if (error)
        FAIL(error);
    return REAL(pwrite64, ssize_t (*)(int, const void *, size_t, off64_t))(fd, bytes, count, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at) { return pwrite64(fd, bytes, count, at); }

ssize_t write(int fd, const void *bytes, size_t count)
{
    int error = is_faulty() ? refuse(fd, lseek(fd, 0, SEEK_CUR) + (int64_t)count) : 0;
    if (error)
        FAIL(error);
    return REAL(write, ssize_t (*)(int, const void *, size_t))(fd, bytes, count);
}

int ftruncate64(int fd, off64_t length)
{
    if (is_faulty() && is_on_the_disk(fd)) {
        if (faults->disk_error)
            FAIL((int)faults->disk_error);
        int64_t size = size_of(fd);
        if (faults->room >= 0 && length < size)
            faults->room += size - length;
    }
    return REAL(ftruncate64, int (*)(int, off64_t))(fd, length);
}

int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

int posix_fallocate64(int fd, off64_t at, off64_t length)
{
    int error = refuse(fd, at + length);
    return error ? error : REAL(posix_fallocate64, int (*)(int, off64_t, off64_t))(fd, at, length);
}

int posix_fallocate(int fd, off_t at, off_t length) { return posix_fallocate64(fd, at, length); }

static int synced(int fd, const char *name)
{
    if (faults->disk_error && is_on_the_disk(fd))
        FAIL((int)faults->disk_error);
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}

int fsync(int fd) { return synced(fd, "fsync"); }

int fdatasync(int fd) { return synced(fd, "fdatasync"); }

int open64(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
    if (writes && faults->disk_error && is_below(path))
        FAIL((int)faults->disk_error);
    return REAL(open64, int (*)(const char *, int, ...))(path, flags, mode);
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open64(path, flags, mode);
}

int unlink(const char *path)
{
    if (faults->disk_error && is_below(path))
        FAIL((int)faults->disk_error);
    return REAL(unlink, int (*)(const char *))(path);
}

int rename(const char *from, const char *to)
{
    if (faults->disk_error && is_below(to))
        FAIL((int)faults->disk_error);
    return REAL(rename, int (*)(const char *, const char *))(from, to);
}

/* -- inotify ------------------------------------------------------------------------------------------------------ */

int inotify_init1(int flags)
{
    if (faults->no_inotify)
        FAIL(EMFILE);
    return REAL(inotify_init1, int (*)(int))(flags);
}

int inotify_add_watch(int fd, const char *path, uint32_t mask)
{
    if (faults->no_inotify)
        FAIL(ENOSPC);
    return REAL(inotify_add_watch, int (*)(int, const char *, uint32_t))(fd, path, mask);
}
