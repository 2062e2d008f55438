/* Reads replies in mid-stream with no interpreter in between; loadgen/wire/reader.py says what a reader does.
 *
 * epoll is level-triggered: what is ready and left alone now comes again with the next pass.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BLOCKED_NS = 50000, BATCH = 512, BUFFER = 1 << 17, SPIN_NS = 120000, MS = 1000000, READ = 1 << 16, LOST = 1 << 17 };

typedef struct { int64_t at; struct timespec kernel; int64_t length, polled; } read_t;
typedef struct { char *bytes; int64_t n, room; } arena_t;
typedef struct { arena_t reads, data; int64_t left; } stream_t; /* left: bytes until the reply is too large */
typedef struct { int32_t fd, what; } report_t;

typedef struct { /* down to the reports as loadgen/wire/compiled_reader.py has it */
    int64_t poller, n_reads, n_bytes, woken, max_pass, polled;
    report_t reports[BATCH];
    stream_t **streams; /* by file descriptor; NULL where none is followed */
    int n_streams;
    int64_t at, complete, delayed;
    int schedstat; /* a file descriptor and 1; 0 before it is opened, -1 where there is none */
    struct epoll_event events[BATCH];
    char buffer[BUFFER];
} reader_t;

const int64_t reader_bytes = sizeof(reader_t);

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int fits(arena_t *a, int64_t n) {
    if (a->n + n <= a->room) return 1;
    int64_t room = 1024 + (a->n + n) * 3 / 2;
    char *moved = realloc(a->bytes, room);
    if (!moved) return 0;
    a->bytes = moved;
    a->room = room;
    return 1;
}

static void append(arena_t *a, const void *bytes, int64_t n) {
    memcpy(a->bytes + a->n, bytes, n);
    a->n += n;
}

/* One read of a stream; 0 where it stays in mid-stream, so that nobody need be told. */
static int take(reader_t *r, int fd, stream_t *s) {
    union { struct cmsghdr aligned; char bytes[CMSG_SPACE(sizeof(struct timespec))]; } control;
    struct iovec into = {r->buffer, BUFFER};
    struct msghdr message = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int64_t n = recvmsg(fd, &message, 0);
    if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : LOST | errno;
    read_t read = {.at = r->at = now(), .length = n, .polled = r->polled};
    if (n == 0) return LOST;
    if ((s->left -= n) < 0) return LOST | EMSGSIZE; /* TCP itself never says so */
    if (CMSG_FIRSTHDR(&message)) memcpy(&read.kernel, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof read.kernel);
    if (!fits(&s->reads, sizeof read) || !fits(&s->data, n)) return LOST | ENOMEM;
    append(&s->reads, &read, sizeof read);
    append(&s->data, r->buffer, n);
    r->n_reads++;
    r->n_bytes += n;
    return s->data.n >= 4 && !memcmp(s->data.bytes + s->data.n - 4, "\n\n\r\n", 4) ? 0 : READ;
}

/* How long this thread has been ready to run without running, in all; -1 where the kernel does not say. */
static int64_t run_delay(reader_t *r) {
    char text[64];
    long long ran, delayed;
    if (!r->schedstat) r->schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC) + 1;
    if (!r->schedstat) r->schedstat = -1;
    ssize_t n = r->schedstat < 0 ? -1 : pread(r->schedstat - 1, text, sizeof text - 1, 0);
    if (n <= 0) return -1;
    text[n] = 0;
    return sscanf(text, "%lld %lld", &ran, &delayed) == 2 ? delayed : -1;
}

/* Since when what is ready now can have come. Before the last poll that reported all there was, nothing of it
 * had. Where this poll slept, what came first woke it, and all that passed since is how long it then waited
 * for a CPU. */
static int64_t quiet_until(reader_t *r, int64_t asked) {
    if (r->woken - asked < BLOCKED_NS) return r->complete;
    int64_t before = r->delayed, delayed = run_delay(r);
    if (delayed < 0) return r->complete;
    r->delayed = delayed;
    int64_t woke = r->woken - (delayed - before);
    return woke > r->complete ? woke : r->complete;
}

/* What is ready, waited for until a little before `due` (then the caller spins), at most until `tick`. */
static int ready(reader_t *r, int64_t due, int64_t tick) {
    int64_t left = (due - SPIN_NS < tick ? due - SPIN_NS : tick) - now();
    if (left > 0 && left < MS) { /* epoll counts in milliseconds, ppoll in nanoseconds */
        struct pollfd poller = {.fd = r->poller, .events = POLLIN};
        ppoll(&poller, 1, &(struct timespec){.tv_nsec = left}, NULL);
    }
    return epoll_wait(r->poller, r->events, BATCH, left > 0 ? left / MS : 0);
}

/* Reads until somebody is needed; how many reports there are. A due time cuts a pass short, unless it had
 * come before the call: then nobody would ever be read where something is always due. */
int reader_wait(reader_t *r, int64_t due, int64_t tick) {
    int n_reports = 0;
    int64_t stop = now() < due ? due : INT64_MAX;
    do {
        int64_t asked = now();
        int n_ready = ready(r, due, tick);
        r->woken = r->at = now();
        r->polled = n_ready ? quiet_until(r, asked) : r->complete;
        int i = 0;
        for (; i < n_ready && r->at < stop; i++) {
            int fd = r->events[i].data.fd, what = r->events[i].events;
            stream_t *s = fd < r->n_streams ? r->streams[fd] : NULL;
            if (s && what == EPOLLIN) what = take(r, fd, s);
            if (what) r->reports[n_reports++] = (report_t){fd, what};
        }
        if (i == n_ready && n_ready < BATCH) r->complete = r->woken;
        if (r->at - r->woken > r->max_pass) r->max_pass = r->at - r->woken;
    } while (!n_reports && r->at < due && r->at < tick);
    return n_reports;
}

/* From now on the stream of `fd` is read here, at most `left` bytes of it. NULL where there is no memory. */
stream_t *reader_follow(reader_t *r, int fd, int64_t left) {
    if (fd >= r->n_streams) {
        stream_t **moved = realloc(r->streams, 2 * (fd + 1) * sizeof *moved);
        if (!moved) return NULL;
        memset(moved + r->n_streams, 0, (2 * (fd + 1) - r->n_streams) * sizeof *moved);
        r->streams = moved;
        r->n_streams = 2 * (fd + 1);
    }
    stream_t *s = calloc(1, sizeof *s);
    if (s) s->left = left;
    return r->streams[fd] = s;
}

/* No longer; what has not been collected is gone. */
void reader_leave(reader_t *r, int fd) {
    free(r->streams[fd]->reads.bytes);
    free(r->streams[fd]->data.bytes);
    free(r->streams[fd]);
    r->streams[fd] = NULL;
}

void reader_close(reader_t *r) {
    for (int fd = 0; fd < r->n_streams; fd++)
        if (r->streams[fd]) reader_leave(r, fd);
    if (r->schedstat > 0) close(r->schedstat - 1);
    r->schedstat = 0;
    free(r->streams);
    r->streams = NULL;
    r->n_streams = 0;
}
