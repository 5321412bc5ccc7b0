/* Faults at the k-th file system call of a process, counted over all its threads.

   Preloaded into a process, it counts calls that change something below one directory (or, for reads, that read
   from it). At call number k it kills the process, tears the write and kills it, interrupts it (SIGINT), makes the
   call fail with an errno, or pauses until a file appears (STEP: at that call and each one after it, with a file
   for each). Nothing happens before shim_arm is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL, TORN, INTERRUPT, FAIL, PAUSE, STEP };

static char root[PATH_MAX], ops[256], pause_at[PATH_MAX];
static size_t root_length;
static atomic_int mode, counter;
static int target, code, repeats;

void shim_arm(const char *directory, const char *which, int how, int k, int error, int again, const char *pausing) {
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    snprintf(ops, sizeof ops, ",%s,", which);
    snprintf(pause_at, sizeof pause_at, "%s", pausing);
    target = k, code = error, repeats = again;
    atomic_store(&counter, 0);
    atomic_store(&mode, how);
}

int shim_count(void) { return atomic_load(&counter); }

static int inside(const char *path) {
    if (path[0] != '/') return 0;
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int fd_inside(int fd) {
    if (atomic_load(&mode) == OFF) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return inside(path);
}

static int counted(const char *op) {
    char name[32];
    snprintf(name, sizeof name, ",%s,", op);
    return strstr(ops, name) != NULL;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void wait_for_go(int step) {
    char path[PATH_MAX + 32], number[16] = "";
    if (step) snprintf(number, sizeof number, ".%d", step);
    snprintf(path, sizeof path, "%s%s.reached", pause_at, number);
    close(syscall(SYS_open, path, O_CREAT | O_WRONLY, 0644));
    snprintf(path, sizeof path, "%s%s.go", pause_at, number);
    while (syscall(SYS_access, path, F_OK) != 0) usleep(2000);
}

/* 0: go on; 1: fail with errno; 2: tear this write, then die; 3: interrupt after the call. */
static int strike(const char *op, int is_inside) {
    int how = atomic_load(&mode);
    if (how == OFF || !is_inside || !counted(op)) return 0;
    int mine = atomic_fetch_add(&counter, 1) + 1;
    int later = mine > target && (how == STEP || (repeats && (how == FAIL || how == INTERRUPT)));
    if (mine != target && !later) return 0;
    switch (how) {
    case KILL: die(); return 0;
    case TORN: return 2;
    case INTERRUPT: return 3;
    case FAIL: errno = code; return 1;
    case PAUSE: wait_for_go(0); return 0;
    case STEP: wait_for_go(mine); return 0;
    default: return 0;
    }
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAULTY(op, where, call)                          \
    int hit_ = strike(op, where);                        \
    if (hit_ == 1) return -1;                            \
    if (hit_ == 2) die();                                \
    __auto_type result_ = (call);                        \
    if (hit_ == 3) { int e_ = errno; kill(getpid(), SIGINT); errno = e_; } \
    return result_

int fsync(int fd) { REAL(fsync); FAULTY("fsync", fd_inside(fd), real(fd)); }
int fdatasync(int fd) { REAL(fdatasync); FAULTY("fsync", fd_inside(fd), real(fd)); }
int syncfs(int fd) { REAL(syncfs); FAULTY("fsync", fd_inside(fd), real(fd)); }
int flock(int fd, int how) { REAL(flock); FAULTY("flock", fd_inside(fd), real(fd, how)); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); FAULTY("write", fd_inside(fd), real(fd, n)); }
int rename(const char *a, const char *b) { REAL(rename); FAULTY("rename", inside(b), real(a, b)); }
int link(const char *a, const char *b) { REAL(link); FAULTY("link", inside(b), real(a, b)); }
int linkat(int d, const char *a, int e, const char *b, int f) {
    REAL(linkat); FAULTY("link", inside(b), real(d, a, e, b, f));
}
int unlink(const char *p) { REAL(unlink); FAULTY("unlink", inside(p), real(p)); }
int rmdir(const char *p) { REAL(rmdir); FAULTY("rmdir", inside(p), real(p)); }
int mkdir(const char *p, mode_t m) { REAL(mkdir); FAULTY("mkdir", inside(p), real(p, m)); }

int open64(const char *p, int flags, ...) {
    REAL(open64);
    mode_t m = 0;
    if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); m = va_arg(a, mode_t); va_end(a); }
    FAULTY((flags & O_CREAT) ? "create" : "open", inside(p), real(p, flags, m));
}

static ssize_t torn(int fd, const struct iovec *v, int n, off64_t at) {
    for (int i = 0; i < n; i++) {
        size_t half = n > 1 ? v[i].iov_len : v[i].iov_len / 2;
        if (i == n - 1 && n > 1) half = v[i].iov_len / 2;
        if (half) (void)!syscall(SYS_pwrite64, fd, v[i].iov_base, half, at);
        at += half;
    }
    die();
    return -1;
}

ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) {
    REAL(pwritev64v2);
    int hit = strike("write", fd_inside(fd));
    if (hit == 1) return -1;
    if (hit == 2) return torn(fd, v, n, at);
    ssize_t result = real(fd, v, n, at, flags);
    if (hit == 3) { int e = errno; kill(getpid(), SIGINT); errno = e; }
    return result;
}
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t at) { return pwritev64v2(fd, v, n, at, 0); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t at) {
    struct iovec v = {(void *)b, n};
    return pwritev64v2(fd, &v, 1, at, 0);
}
ssize_t write(int fd, const void *b, size_t n) { REAL(write); FAULTY("write", fd_inside(fd), real(fd, b, n)); }

ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) {
    REAL(preadv64v2);
    FAULTY("read", fd_inside(fd), real(fd, v, n, at, flags));
}
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { return preadv64v2(fd, v, n, at, 0); }
ssize_t pread64(int fd, void *b, size_t n, off64_t at) { REAL(pread64); FAULTY("read", fd_inside(fd), real(fd, b, n, at)); }
ssize_t read(int fd, void *b, size_t n) { REAL(read); FAULTY("read", fd_inside(fd), real(fd, b, n)); }
