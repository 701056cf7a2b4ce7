/* Fails, kills or interrupts a process at its k-th call that changes a file below one folder; see injection.py.

   Loaded with LD_PRELOAD, so that it sees every caller of libc: Python, torch, safetensors (Rust), numpy. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, FAIL, KILL, TORN, SIGNAL, FULL };

static char folder[PATH_MAX];
static int armed, mode, code, journal = -1, swaps = 1;
static long at;
static atomic_long calls;

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Called by ctypes: what happens at call number k (from 1 on), below which folder; a line a call goes to `log`. */
void faults_arm(const char *root, int what, long k, int number, int log) {
    snprintf(folder, sizeof folder, "%s", root);
    mode = what, at = k, code = number, journal = log;
    atomic_store(&calls, 0);
    armed = 1;
}

void faults_disarm(void) { armed = 0; }

/* Whether the file system can exchange two folders in one step; many cannot. */
void faults_exchange(int can) { swaps = can; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int below(int fd, const char *name, char *path) {
    char link[64];
    path[0] = 0;
    if (name == NULL || (name[0] != '/' && fd != AT_FDCWD)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, PATH_MAX - 1);
        if (length < 0) return 0;
        path[length] = 0;
    } else if (name[0] != '/') {
        if (getcwd(path, PATH_MAX) == NULL) return 0;
    }
    if (name != NULL) {
        size_t used = name[0] == '/' ? 0 : strlen(path);
        snprintf(path + used, PATH_MAX - used, "%s%s", used ? "/" : "", name);
    }
    size_t length = strlen(folder);
    return strncmp(path, folder, length) == 0 && path[length] == '/';
}

/* 0: go on. 1: fail with errno. 2: do half of it, then die. `room`: the call needs room on the disk. */
static int turn(const char *kind, int room, int fd, const char *name) {
    char path[PATH_MAX], line[PATH_MAX + 64];
    if (!armed) return 0;
    int before = errno;
    if (!below(fd, name, path)) {
        errno = before;
        return 0;
    }
    long number = atomic_fetch_add(&calls, 1) + 1;
    if (journal >= 0) {
        ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
        int length = snprintf(line, sizeof line, "%s %s\n", kind, path + strlen(folder) + 1);
        if (real(journal, line, length) != length) abort();
    }
    errno = before;
    if (mode == FULL && number >= at && room) {
        errno = code;
        return 1;
    }
    if (number != at || mode == COUNT || mode == FULL) return 0;
    if (mode == KILL) die();
    if (mode == TORN) return 2;
    if (mode == SIGNAL) {
        kill(getpid(), code);
        return 0;
    }
    errno = code;
    return 1;
}

#define AROUND(kind, room, fd, name, call)                 \
    int fate = turn(kind, room, fd, name);                 \
    if (fate == 1) return -1;                              \
    __auto_type result = call;                             \
    if (fate == 2) die();                                  \
    return result

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int fate = turn("write", 1, fd, NULL);
    if (fate == 1) return -1;
    ssize_t result = real(fd, data, fate == 2 ? size / 2 : size);
    if (fate == 2) die();
    return result;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    AROUND("write", 1, fd, NULL, real(fd, data, fate == 2 ? size / 2 : size, offset));
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    AROUND("write", 1, fd, NULL, real(fd, data, fate == 2 ? size / 2 : size, offset));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    AROUND("write", 1, fd, NULL, real(fd, parts, fate == 2 ? (count + 1) / 2 : count));
}

ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    REAL(sendfile);
    AROUND("write", 1, to, NULL, real(to, from, offset, fate == 2 && size > 8 ? 8 : size));
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
    REAL(sendfile64);
    AROUND("write", 1, to, NULL, real(to, from, offset, fate == 2 && size > 8 ? 8 : size));
}

ssize_t copy_file_range(int from, off64_t *one, int to, off64_t *other, size_t size, unsigned flags) {
    REAL(copy_file_range);
    AROUND("write", 1, to, NULL, real(from, one, to, other, fate == 2 && size > 8 ? 8 : size, flags));
}

int fsync(int fd) { REAL(fsync); AROUND("fsync", 1, fd, NULL, real(fd)); }
int fdatasync(int fd) { REAL(fdatasync); AROUND("fsync", 1, fd, NULL, real(fd)); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); AROUND("truncate", 1, fd, NULL, real(fd, size)); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); AROUND("truncate", 1, fd, NULL, real(fd, size)); }
int truncate(const char *path, off_t size) { REAL(truncate); AROUND("truncate", 1, AT_FDCWD, path, real(path, size)); }
int fallocate(int fd, int how, off_t at_, off_t size) { REAL(fallocate); AROUND("truncate", 1, fd, NULL, real(fd, how, at_, size)); }

int posix_fallocate(int fd, off_t from, off_t size) {
    REAL(posix_fallocate);
    int fate = turn("truncate", 1, fd, NULL);
    if (fate == 1) return errno;
    int result = real(fd, from, size);
    if (fate == 2) die();
    return result;
}

int mkdir(const char *path, mode_t bits) { REAL(mkdir); AROUND("mkdir", 1, AT_FDCWD, path, real(path, bits)); }
int mkdirat(int fd, const char *path, mode_t bits) { REAL(mkdirat); AROUND("mkdir", 1, fd, path, real(fd, path, bits)); }
int rmdir(const char *path) { REAL(rmdir); AROUND("rmdir", 0, AT_FDCWD, path, real(path)); }
int unlink(const char *path) { REAL(unlink); AROUND("unlink", 0, AT_FDCWD, path, real(path)); }

int unlinkat(int fd, const char *path, int flags) {
    REAL(unlinkat);
    AROUND(flags & AT_REMOVEDIR ? "rmdir" : "unlink", 0, fd, path, real(fd, path, flags));
}

int rename(const char *from, const char *to) { REAL(rename); AROUND("rename", 0, AT_FDCWD, to, real(from, to)); }

int renameat(int one, const char *from, int other, const char *to) {
    REAL(renameat);
    AROUND("rename", 0, other, to, real(one, from, other, to));
}

int renameat2(int one, const char *from, int other, const char *to, unsigned flags) {
    REAL(renameat2);
    if (flags && !swaps) {
        errno = EINVAL;
        return -1;
    }
    AROUND("rename", 0, other, to, real(one, from, other, to, flags));
}

int link(const char *from, const char *to) { REAL(link); AROUND("link", 1, AT_FDCWD, to, real(from, to)); }
int symlink(const char *from, const char *to) { REAL(symlink); AROUND("link", 1, AT_FDCWD, to, real(from, to)); }

int linkat(int one, const char *from, int other, const char *to, int flags) {
    REAL(linkat);
    AROUND("link", 1, other, to, real(one, from, other, to, flags));
}

#define OPENING(name)                                                                     \
    int name(const char *path, int flags, ...) {                                          \
        mode_t bits = 0;                                                                  \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                            \
            va_list rest;                                                                 \
            va_start(rest, flags);                                                        \
            bits = va_arg(rest, mode_t);                                                  \
            va_end(rest);                                                                 \
        }                                                                                 \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                    \
        if (!(flags & O_CREAT)) return real(path, flags, bits);                           \
        AROUND("create", 1, AT_FDCWD, path, real(path, flags, bits));                     \
    }                                                                                     \
    int name##at_(int, const char *)

OPENING(open);
OPENING(open64);

#define OPENING_AT(name)                                                                  \
    int name(int fd, const char *path, int flags, ...) {                                  \
        mode_t bits = 0;                                                                  \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                            \
            va_list rest;                                                                 \
            va_start(rest, flags);                                                        \
            bits = va_arg(rest, mode_t);                                                  \
            va_end(rest);                                                                 \
        }                                                                                 \
        int (*real)(int, const char *, int, ...) = dlsym(RTLD_NEXT, #name);               \
        if (!(flags & O_CREAT)) return real(fd, path, flags, bits);                       \
        AROUND("create", 1, fd, path, real(fd, path, flags, bits));                       \
    }                                                                                     \
    int name##_(int, const char *)

OPENING_AT(openat);
OPENING_AT(openat64);

#define STREAM(name)                                                                      \
    FILE *name(const char *path, const char *how) {                                       \
        REAL(name);                                                                       \
        int fate = strpbrk(how, "wa") != NULL ? turn("create", 1, AT_FDCWD, path) : 0;    \
        if (fate == 1) return NULL;                                                       \
        FILE *result = real(path, how);                                                   \
        if (fate == 2) die();                                                             \
        return result;                                                                    \
    }                                                                                     \
    int name##_(const char *)

STREAM(fopen);
STREAM(fopen64);

/* The network: there is none while we watch, and whoever asks for it is written down. */
static int asked(const char *what) {
    char line[300];
    if (!armed) return 0;
    if (journal >= 0) {
        ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
        int length = snprintf(line, sizeof line, "network %s\n", what);
        if (real(journal, line, length) != length) abort();
    }
    return 1;
}

int socket(int domain, int type, int protocol) {
    REAL(socket);
    if ((domain == AF_INET || domain == AF_INET6) && asked("socket")) {
        errno = ENETUNREACH;
        return -1;
    }
    return real(domain, type, protocol);
}

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    REAL(getaddrinfo);
    return asked(host ? host : "-") ? EAI_FAIL : real(host, service, hints, found);
}
