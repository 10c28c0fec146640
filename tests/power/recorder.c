/* Records what a process does to the files below one directory: a library for LD_PRELOAD (tests/power/recording.py).
 *
 * Each operation is one record, in the order in which it was done:
 *     KIND <tab> path <tab> new path <tab> inode <tab> offset or size <tab> bytes of data <newline> data
 * Nothing is recorded before power_record. A sync is recorded and not done: the tests ask what a disk may lose, and no
 * power is cut. tests/power/disk.py compares the records with the directory, so a call that is missing here fails a test.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define DESCRIPTORS 4096
enum { UNTRACKED, REGULAR, DIRECTORY };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int records = -1;
static long until_kill;
static unsigned char tracked[DESCRIPTORS];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void fail(const char *what) {
    dprintf(2, "recorder: %s: %s\n", what, strerror(errno));
    abort();
}

/* Record the operations of this process below `directory` in the file `log`, and kill the process instead of doing its
 * `kill_at`-th one (0: never). */
__attribute__((visibility("default"))) void power_record(const char *directory, const char *log, long kill_at) {
    if (!realpath(directory, root)) fail(directory);
    root_length = strlen(root);
    until_kill = kill_at;
    memset(tracked, UNTRACKED, sizeof tracked);
    records = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (records < 0) fail(log);
}

static int below_root(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* Write the absolute path of a name, whose last part need not exist; return whether it is below the root. */
static int locate(int directory, const char *name, char *out) {
    char parent[PATH_MAX], copy[PATH_MAX];
    if (records < 0 || !name || strlen(name) >= PATH_MAX) return 0;
    strcpy(copy, name);
    char *slash = strrchr(copy, '/');
    const char *last = slash ? slash + 1 : copy;
    if (slash) *slash = 0;
    if (name[0] == '/') {
        if (!realpath(slash == copy ? "/" : copy, parent)) return 0;
    } else {
        char base[PATH_MAX], joined[2 * PATH_MAX];
        if (directory == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        snprintf(joined, sizeof joined, "%s/%s", base, slash ? copy : "");
        if (!realpath(joined, parent)) return 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", parent, last) >= PATH_MAX) fail("path");
    return below_root(out);
}

/* The next operation is about to be done: this is where a killed process ends. Called with the lock. */
static void before(void) {
    if (until_kill && !--until_kill) kill(getpid(), SIGKILL);
}

static void record(char kind, const char *path, const char *other, unsigned long inode, long offset, const void *data,
                   size_t size) {
    char head[2 * PATH_MAX + 128];
    int length = snprintf(head, sizeof head, "%c\t%s\t%s\t%lu\t%ld\t%zu\n", kind, path, other, inode, offset, size);
    struct iovec parts[] = {{head, (size_t)length}, {(void *)data, size}};
    if (syscall(SYS_writev, records, parts, 2) != (long)(length + size)) fail("record");
}

/* A line of the test among the operations. */
__attribute__((visibility("default"))) void power_mark(const char *text) {
    pthread_mutex_lock(&lock);
    record('A', "", "", 0, 0, text, strlen(text));
    pthread_mutex_unlock(&lock);
}

static unsigned long inode_of(int descriptor) {
    struct stat found;
    if (fstat(descriptor, &found)) fail("fstat");
    return found.st_ino;
}

static int open_and_record(int directory, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat found;
    int here = locate(directory, name, path);
    if (!here) {
        int other = (int)syscall(SYS_openat, directory, name, flags, mode);
        if (other >= 0 && other < DESCRIPTORS) tracked[other] = UNTRACKED;
        return other;
    }
    pthread_mutex_lock(&lock);
    int absent = fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) && errno == ENOENT;
    if ((flags & O_TRUNC) || ((flags & O_CREAT) && absent)) before();
    int opened = (int)syscall(SYS_openat, directory, name, flags, mode);
    int error = errno;
    if (opened >= DESCRIPTORS) fail("too many descriptors");
    if (opened >= 0) {
        if (fstat(opened, &found)) fail("fstat");
        tracked[opened] = S_ISREG(found.st_mode) ? REGULAR : S_ISDIR(found.st_mode) ? DIRECTORY : UNTRACKED;
        if (tracked[opened] == REGULAR) {
            if (absent) record('C', path, "", found.st_ino, 0, "", 0);
            else if (flags & O_TRUNC) record('T', path, "", found.st_ino, 0, "", 0);
        }
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return opened;
}

#define OPENS(name, ...)                                                                                              \
    __attribute__((visibility("default"))) int name(__VA_ARGS__, int flags, ...)
#define MODE                                                                                                          \
    mode_t mode = 0;                                                                                                  \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                                                            \
        va_list rest;                                                                                                 \
        va_start(rest, flags);                                                                                        \
        mode = va_arg(rest, mode_t);                                                                                  \
        va_end(rest);                                                                                                 \
    }
OPENS(open, const char *name) { MODE return open_and_record(AT_FDCWD, name, flags, mode); }
OPENS(open64, const char *name) { MODE return open_and_record(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
OPENS(openat, int directory, const char *name) { MODE return open_and_record(directory, name, flags, mode); }
OPENS(openat64, int directory, const char *name) {
    MODE return open_and_record(directory, name, flags | O_LARGEFILE, mode);
}

#define EXPORT __attribute__((visibility("default")))

static int is(int descriptor, int kind) {
    return records >= 0 && descriptor >= 0 && descriptor < DESCRIPTORS && tracked[descriptor] == kind;
}

EXPORT int close(int descriptor) {
    if (descriptor == records && records >= 0) return 0; /* whoever closes all descriptors does not know this one */
    if (descriptor >= 0 && descriptor < DESCRIPTORS) tracked[descriptor] = UNTRACKED;
    return (int)syscall(SYS_close, descriptor);
}

EXPORT ssize_t write(int descriptor, const void *data, size_t size) {
    if (!is(descriptor, REGULAR)) return syscall(SYS_write, descriptor, data, size);
    pthread_mutex_lock(&lock);
    before();
    ssize_t written = syscall(SYS_write, descriptor, data, size);
    int error = errno;
    /* The position after it is right for a file that is appended to as well. */
    if (written > 0)
        record('W', "", "", inode_of(descriptor), lseek(descriptor, 0, SEEK_CUR) - written, data, (size_t)written);
    pthread_mutex_unlock(&lock);
    errno = error;
    return written;
}

EXPORT ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
    if (!is(descriptor, REGULAR)) return syscall(SYS_pwrite64, descriptor, data, size, offset);
    pthread_mutex_lock(&lock);
    before();
    ssize_t written = syscall(SYS_pwrite64, descriptor, data, size, offset);
    int error = errno;
    if (written > 0) record('W', "", "", inode_of(descriptor), offset, data, (size_t)written);
    pthread_mutex_unlock(&lock);
    errno = error;
    return written;
}
EXPORT ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
    return pwrite64(descriptor, data, size, offset);
}

EXPORT int ftruncate64(int descriptor, off64_t size) {
    if (!is(descriptor, REGULAR)) return (int)syscall(SYS_ftruncate, descriptor, size);
    pthread_mutex_lock(&lock);
    before();
    int result = (int)syscall(SYS_ftruncate, descriptor, size);
    int error = errno;
    if (!result) record('T', "", "", inode_of(descriptor), size, "", 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}
EXPORT int ftruncate(int descriptor, off_t size) { return ftruncate64(descriptor, size); }

EXPORT int posix_fallocate64(int descriptor, off64_t offset, off64_t size) {
    if (!is(descriptor, REGULAR)) return REAL(posix_fallocate64)(descriptor, offset, size);
    struct stat found;
    pthread_mutex_lock(&lock);
    before();
    int result = REAL(posix_fallocate64)(descriptor, offset, size);
    if (!result) {
        if (fstat(descriptor, &found)) fail("fstat");
        record('T', "", "", found.st_ino, found.st_size, "", 0);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
EXPORT int posix_fallocate(int descriptor, off_t offset, off_t size) {
    return posix_fallocate64(descriptor, offset, size);
}

static int sync_and_record(int descriptor, long number) {
    if (is(descriptor, DIRECTORY)) {
        char link[64], path[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t length = readlink(link, path, sizeof path - 1);
        if (length < 0) fail(link);
        path[length] = 0;
        pthread_mutex_lock(&lock);
        before();
        record('D', path, "", 0, 0, "", 0);
        pthread_mutex_unlock(&lock);
        return 0;
    }
    if (!is(descriptor, REGULAR)) return (int)syscall(number, descriptor);
    pthread_mutex_lock(&lock);
    before();
    record('S', "", "", inode_of(descriptor), 0, "", 0);
    pthread_mutex_unlock(&lock);
    return 0;
}
EXPORT int fsync(int descriptor) { return sync_and_record(descriptor, SYS_fsync); }
EXPORT int fdatasync(int descriptor) { return sync_and_record(descriptor, SYS_fdatasync); }

/* Do a system call that changes names, and record it if it succeeds. */
#define NAMES(kind, here, path, other, call)                                                                          \
    if (!(here)) return (int)(call);                                                                                  \
    pthread_mutex_lock(&lock);                                                                                        \
    before();                                                                                                         \
    int result = (int)(call);                                                                                         \
    int error = errno;                                                                                                \
    if (!result) record(kind, path, other, 0, 0, "", 0);                                                              \
    pthread_mutex_unlock(&lock);                                                                                      \
    errno = error;                                                                                                    \
    return result;

EXPORT int renameat(int from, const char *name, int to, const char *new_name) {
    char path[PATH_MAX] = "", other[PATH_MAX] = "";
    NAMES('R', locate(from, name, path) && locate(to, new_name, other), path, other,
          syscall(SYS_renameat2, from, name, to, new_name, 0))
}
EXPORT int rename(const char *name, const char *new_name) { return renameat(AT_FDCWD, name, AT_FDCWD, new_name); }

EXPORT int linkat(int from, const char *name, int to, const char *new_name, int flags) {
    char path[PATH_MAX] = "", other[PATH_MAX] = "";
    NAMES('L', locate(from, name, path) && locate(to, new_name, other), path, other,
          syscall(SYS_linkat, from, name, to, new_name, flags))
}
EXPORT int link(const char *name, const char *new_name) { return linkat(AT_FDCWD, name, AT_FDCWD, new_name, 0); }

EXPORT int unlinkat(int directory, const char *name, int flags) {
    char path[PATH_MAX] = "";
    NAMES('U', locate(directory, name, path), path, "", syscall(SYS_unlinkat, directory, name, flags))
}
EXPORT int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
EXPORT int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

EXPORT int mkdirat(int directory, const char *name, mode_t mode) {
    char path[PATH_MAX] = "";
    NAMES('M', locate(directory, name, path), path, "", syscall(SYS_mkdirat, directory, name, mode))
}
EXPORT int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
