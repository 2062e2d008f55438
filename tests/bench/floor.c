/* The floor: the least a client must do. One thread, epoll, recvmsg with kernel stamps, one burst.
 *
 *   floor PORT N_STREAMS BODY_BYTES OUT
 *
 * Sends N_STREAMS requests at once, each out of memory of its own as prompts that differ are, stamps and keeps
 * every read, and writes to OUT, native-endian:
 * cpu_ns, t0, then per stream: sent, n_reads, n_bytes, at[], kernel[] (monotonic), length[], bytes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_READS = 4096, BUFFER = 1 << 17, BATCH = 512 };

typedef struct {
    int fd, n_reads, n_bytes, capacity, whole;
    int64_t sent, *at, *kernel, *length;
    char *request, *data;
} stream_t;

static int64_t clock_ns(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void keep(stream_t *s, int64_t at, int64_t kernel, const char *bytes, int n) {
    if (s->n_bytes + n > s->capacity) s->data = realloc(s->data, s->capacity = 2 * (s->n_bytes + n));
    memcpy(s->data + s->n_bytes, bytes, n);
    s->n_bytes += n;
    s->at[s->n_reads] = at;
    s->kernel[s->n_reads] = kernel;
    s->length[s->n_reads++] = n;
    s->whole = s->n_bytes >= 5 && !memcmp(s->data + s->n_bytes - 5, "0\r\n\r\n", 5);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    int n_streams = atoi(argv[2]), n_body = atoi(argv[3]), one = 1;
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    char *request = malloc(n_body + 256);
    int n_request = sprintf(request, "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n", n_body);
    memset(request + n_request, 'x', n_body);
    n_request += n_body;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int poller = epoll_create1(0);
    stream_t *streams = calloc(n_streams, sizeof *streams);
    for (int i = 0; i < n_streams; i++) {
        stream_t *s = &streams[i];
        s->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(s->fd, (void *)&to, sizeof to)) { perror("connect"); return 1; }
        setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(s->fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
        s->request = memcpy(malloc(n_request), request, n_request);
        s->at = malloc(3 * MAX_READS * sizeof *s->at);
        s->kernel = s->at + MAX_READS;
        s->length = s->kernel + MAX_READS;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
        epoll_ctl(poller, EPOLL_CTL_ADD, s->fd, &event);
    }
    usleep(200000);
    int64_t offset = clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC);
    int64_t cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID), t0 = clock_ns(CLOCK_MONOTONIC);
    for (int i = 0; i < n_streams; i++) {
        if (send(streams[i].fd, streams[i].request, n_request, 0) != n_request) return 1;
        streams[i].sent = clock_ns(CLOCK_MONOTONIC);
    }
    static char buffer[BUFFER], control[64];
    struct epoll_event events[BATCH];
    struct iovec iov = {buffer, BUFFER};
    for (int n_open = n_streams; n_open;) {
        int n = epoll_wait(poller, events, BATCH, 1000);
        for (int i = 0; i < n; i++) {
            stream_t *s = events[i].data.ptr;
            struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = 64};
            int got = recvmsg(s->fd, &message, 0);
            int64_t at = clock_ns(CLOCK_MONOTONIC), kernel = 0;
            if (got <= 0) { fprintf(stderr, "floor: a stream ended early\n"); return 1; }
            struct cmsghdr *c = CMSG_FIRSTHDR(&message);
            if (c) {
                struct timespec *t = (void *)CMSG_DATA(c);
                kernel = t->tv_sec * 1000000000LL + t->tv_nsec - offset;
            }
            keep(s, at, kernel, buffer, got);
            if (s->whole) { epoll_ctl(poller, EPOLL_CTL_DEL, s->fd, NULL); n_open--; }
        }
    }
    cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    FILE *out = fopen(argv[4], "wb");
    fwrite(&cpu, 8, 1, out);
    fwrite(&t0, 8, 1, out);
    for (int i = 0; i < n_streams; i++) {
        stream_t *s = &streams[i];
        int64_t sizes[3] = {s->sent, s->n_reads, s->n_bytes};
        fwrite(sizes, 8, 3, out);
        fwrite(s->at, 8, s->n_reads, out);
        fwrite(s->kernel, 8, s->n_reads, out);
        fwrite(s->length, 8, s->n_reads, out);
        fwrite(s->data, 1, s->n_bytes, out);
    }
    return fclose(out);
}
