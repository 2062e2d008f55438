/* A server that knows the truth: one thread, epoll, an absolute schedule.
 *
 *   truth PORT N_TOKENS TTFT_US GAP_US
 *
 * Answers every POST with an event stream of N_TOKENS events, the first TTFT_US after the request arrived
 * whole, the others GAP_US apart, each carrying "t", the monotonic ns just before it was written; the first
 * also carries "a", when the request had arrived. Prints its port. Ends with its parent (end of stdin).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
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

enum { MAX_FD = 65536, MAX_REQUEST = 1 << 20, BATCH = 512 };

typedef struct {
    char *in;
    int n_in, n_need;
    int n_sent;
    int64_t arrived, next;
    int slot; /* place in the heap, -1 outside */
} conn_t;

static conn_t conns[MAX_FD];
static int heap[MAX_FD], n_heap;
static int n_tokens;
static int64_t ttft_ns, gap_ns;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void put(int slot, int fd) { heap[slot] = fd; conns[fd].slot = slot; }

static void sift(int slot) {
    int fd = heap[slot];
    while (slot > 0 && conns[heap[(slot - 1) / 2]].next > conns[fd].next) {
        put(slot, heap[(slot - 1) / 2]);
        slot = (slot - 1) / 2;
    }
    for (;;) {
        int child = 2 * slot + 1;
        if (child >= n_heap) break;
        if (child + 1 < n_heap && conns[heap[child + 1]].next < conns[heap[child]].next) child++;
        if (conns[heap[child]].next >= conns[fd].next) break;
        put(slot, heap[child]);
        slot = child;
    }
    put(slot, fd);
}

static void heap_add(int fd) { put(n_heap, fd); sift(n_heap++); }

static void heap_remove(int fd) {
    int slot = conns[fd].slot;
    if (slot < 0) return;
    conns[fd].slot = -1;
    int last = heap[--n_heap];
    if (last != fd) { put(slot, last); sift(slot); }
}

static void drop(int fd) {
    heap_remove(fd);
    free(conns[fd].in);
    conns[fd].in = NULL;
    close(fd);
}

static void request_arrived(int fd) {
    conn_t *c = &conns[fd];
    c->arrived = now();
    c->n_sent = 0;
    c->n_in = 0;
    c->n_need = 0;
    c->next = c->arrived + ttft_ns;
    heap_add(fd);
}

static void readable(int fd) {
    conn_t *c = &conns[fd];
    int n = recv(fd, c->in + c->n_in, MAX_REQUEST - 1 - c->n_in, 0);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) drop(fd);
        return;
    }
    c->n_in += n;
    c->in[c->n_in] = 0;
    if (!c->n_need) {
        char *end = memmem(c->in, c->n_in, "\r\n\r\n", 4);
        if (!end) return;
        char *length = strcasestr(c->in, "content-length:");
        c->n_need = (int)(end + 4 - c->in) + (length && length < end ? atoi(length + 15) : 0);
    }
    if (c->n_in >= c->n_need) request_arrived(fd);
}

static const char HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

static void write_event(int fd) {
    static char event[1024], out[2048];
    conn_t *c = &conns[fd];
    int64_t t = now();
    int n = sprintf(event,
                    "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\"t\":%ld,"
                    "\"a\":%ld,\"model\":\"truth\",\"choices\":[{\"index\":0,\"text\":\" token\",\"logprobs\":null,"
                    "\"finish_reason\":%s}]}\n\n",
                    (long)t, (long)c->arrived, c->n_sent + 1 == n_tokens ? "\"length\"" : "null");
    int m = sprintf(out, "%s%x\r\n%s\r\n", c->n_sent ? "" : HEAD, n, event);
    c->n_sent++;
    int last = c->n_sent == n_tokens;
    if (last) m += sprintf(out + m, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    if (send(fd, out, m, MSG_NOSIGNAL) != m) { drop(fd); return; }
    if (last) heap_remove(fd);
    else { c->next = c->arrived + ttft_ns + c->n_sent * gap_ns; sift(conns[fd].slot); }
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    n_tokens = atoi(argv[2]);
    ttft_ns = atoll(argv[3]) * 1000;
    gap_ns = atoll(argv[4]) * 1000;
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 4096)) { perror("truth"); return 1; }
    socklen_t size = sizeof at;
    getsockname(listener, (void *)&at, &size);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    int poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[BATCH];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    event.data.fd = 0;
    epoll_ctl(poller, EPOLL_CTL_ADD, 0, &event);
    for (;;) {
        /* Spin while tokens fall due: the schedule is the server's promise. */
        int wait_ms = n_heap && conns[heap[0]].next - now() < 2000000 ? 0 : n_heap ? 1 : 100;
        int n = epoll_wait(poller, events, BATCH, wait_ms);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == 0) {
                char c[64];
                if (read(0, c, sizeof c) <= 0) return 0;
            } else if (fd == listener) {
                int peer;
                while ((peer = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    conns[peer] = (conn_t){.in = malloc(MAX_REQUEST), .slot = -1};
                    event.data.fd = peer;
                    epoll_ctl(poller, EPOLL_CTL_ADD, peer, &event);
                }
            } else readable(fd);
        }
        for (int k = 0; k < 64 && n_heap && conns[heap[0]].next <= now(); k++) write_event(heap[0]);
    }
}
