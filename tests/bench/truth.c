/* A server that knows the truth: one thread, epoll, an absolute schedule.
 *
 *   truth PORT N_TOKENS TTFT_US GAP_US [LOG PROMPT_TOKENS [ADDRESS]]
 *
 * Answers every POST with an event stream of N_TOKENS events (fewer where its "max_tokens" says so), the first
 * TTFT_US after the request arrived whole, the others GAP_US apart, each carrying "t", the monotonic ns just
 * before it was written, and "a", when the request had arrived. Where asked for, usage follows, which claims
 * PROMPT_TOKENS. Any GET lists one model, as vLLM does. Prints its port. Ends with its parent (end of stdin) and then writes
 * to LOG, per request in the order of arrival, int64: first byte, arrived whole, n events, N_TOKENS times.
 * With TRUTH_JITTER in the environment each event comes up to half a gap early, so that gaps are of many sizes.
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

enum { MAX_FD = 65536, MAX_REQUEST = 1 << 20, BATCH = 512, MAX_ROWS = 1 << 15 };

typedef struct {
    char *in;
    int n_in, n_need;
    int n_sent, n_asked, usage;
    int64_t first, arrived, next;
    int64_t *row; /* in the log, NULL without one */
    int slot; /* place in the heap, -1 outside */
} conn_t;

static conn_t conns[MAX_FD];
static int heap[MAX_FD], n_heap;
static int n_tokens, n_prompt;
static int64_t *rows, n_rows;
static int64_t ttft_ns, gap_ns;
static int jitter;

static int64_t ns_of(struct timespec t) { return t.tv_sec * 1000000000LL + t.tv_nsec; }

static int64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return ns_of(t);
}

static int64_t now(void) { return clock_ns(CLOCK_MONOTONIC); }

/* recv; *at is when the kernel had received it, by our clock: our own reading may come later. */
static int received(int fd, char *to, int room, int64_t *at) {
    char space[128];
    struct iovec part = {to, room};
    struct msghdr msg = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    int n = recvmsg(fd, &msg, 0);
    int64_t read = *at = now();
    for (struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&msg) : NULL; c; c = CMSG_NXTHDR(&msg, c)) {
        struct timespec t;
        if (c->cmsg_type != SCM_TIMESTAMPNS) continue;
        memcpy(&t, CMSG_DATA(c), sizeof t);
        int64_t stamp = ns_of(t) - clock_ns(CLOCK_REALTIME) + read;
        if (stamp <= read && stamp > read - 1000000000) *at = stamp;
    }
    return n;
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

static const char MODELS[] =
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    "{\"object\":\"list\",\"data\":[{\"id\":\"truth\",\"object\":\"model\",\"owned_by\":\"vllm\",\"max_model_len\":1000000}]}";

static void request_arrived(int fd) {
    conn_t *c = &conns[fd];
    c->n_sent = 0;
    c->n_in = 0;
    c->n_need = 0;
    if (!strncmp(c->in, "GET ", 4)) {
        if (send(fd, MODELS, sizeof MODELS - 1, MSG_NOSIGNAL) < 0) drop(fd);
        return;
    }
    char *asked = strstr(c->in, "\"max_tokens\":");
    int n = asked ? atoi(asked + 13) : n_tokens;
    c->n_asked = n > 0 && n < n_tokens ? n : n_tokens;
    c->usage = strstr(c->in, "\"include_usage\":") != NULL;
    c->row = rows && n_rows < MAX_ROWS ? rows + n_rows++ * (3 + n_tokens) : NULL;
    if (c->row) { c->row[0] = c->first; c->row[1] = c->arrived; }
    c->next = c->arrived + ttft_ns;
    heap_add(fd);
}

static void readable(int fd) {
    conn_t *c = &conns[fd];
    int n = received(fd, c->in + c->n_in, MAX_REQUEST - 1 - c->n_in, &c->arrived);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) drop(fd);
        return;
    }
    if (!c->n_in) c->first = c->arrived;
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
                    (long)t, (long)c->arrived, c->n_sent + 1 == c->n_asked ? "\"length\"" : "null");
    int m = sprintf(out, "%s%x\r\n%s\r\n", c->n_sent ? "" : HEAD, n, event);
    if (c->row) { c->row[3 + c->n_sent] = t; c->row[2] = c->n_sent + 1; }
    c->n_sent++;
    int last = c->n_sent == c->n_asked;
    if (last && c->usage) {
        n = sprintf(event,
                    "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\"model\":\"truth\","
                    "\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\n",
                    n_prompt, c->n_sent, n_prompt + c->n_sent);
        m += sprintf(out + m, "%x\r\n%s\r\n", n, event);
    }
    if (last) m += sprintf(out + m, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    if (send(fd, out, m, MSG_NOSIGNAL) != m) { drop(fd); return; }
    if (last) heap_remove(fd);
    else {
        double place = c->n_sent + 17.0 * fd, turns = place * place * 0.6180339887498949;
        c->next = c->arrived + ttft_ns + c->n_sent * gap_ns;
        if (jitter) c->next -= (int64_t)(0.5 * gap_ns * (turns - (int64_t)turns));
        sift(conns[fd].slot);
    }
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    n_tokens = atoi(argv[2]);
    jitter = getenv("TRUTH_JITTER") != NULL;
    ttft_ns = atoll(argv[3]) * 1000;
    gap_ns = atoll(argv[4]) * 1000;
    if (argc > 6) { n_prompt = atoi(argv[6]); rows = calloc(MAX_ROWS, (3 + n_tokens) * sizeof *rows); }
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(listener, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one); /* its connections inherit it */
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = argc > 7 ? inet_addr(argv[7]) : htonl(INADDR_LOOPBACK)};
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
                if (read(0, c, sizeof c) > 0) continue;
                FILE *log = rows ? fopen(argv[5], "wb") : NULL;
                if (log) { fwrite(rows, (3 + n_tokens) * sizeof *rows, n_rows, log); fclose(log); }
                return 0;
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
