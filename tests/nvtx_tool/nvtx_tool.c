/* A tool that NVTX loads (NVTX_INJECTION64_PATH), as Nsight Systems is one. It writes each range that a process opens
   and closes to the file NVTX_TOOL_FOLDER/PID: the thread, the time in nanoseconds, and "+" with the text, or "-".

   The tables and structures are those of NVTX 3 (nvtxDetail/nvtxTypes.h): the places of functions in a table, and the
   layout of an event, never change. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*functions_of)(int module, Function ***table, unsigned *count);
} Callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type; /* 1: ASCII, 3: a registered string, for which this tool's handle is its text */
    const char *message;
} Event;

enum { CALLBACKS = 1, CORE = 1, CORE2 = 5 };
enum { PUSH_EX = 8, PUSH_ASCII = 9, POP = 11 };                          /* of CORE */
enum { DOMAIN_PUSH_EX = 4, DOMAIN_POP = 5, DOMAIN_REGISTER_ASCII = 10 }; /* of CORE2 */

static int output = -1;
static __thread int depth;

static void line(const char *sign, const char *text) {
    char buffer[1024];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long nanoseconds = now.tv_sec * 1000000000LL + now.tv_nsec;
    int length = snprintf(buffer, sizeof buffer, "%ld %lld %s%s\n", (long)syscall(SYS_gettid), nanoseconds, sign, text);
    if (write(output, buffer, length) != length) abort();
}
static int push_text(const char *text) { line("+", text); return depth++; }
static int push(const Event *event) { return push_text(event->message_type == 2 ? "?" : event->message); }
static int pop(void) { line("-", ""); return --depth; }
static int domain_push(void *domain, const Event *event) { return push(event); }
static int domain_pop(void *domain) { return pop(); }
static const char *keep(void *domain, const char *text) { return strdup(text); }

int InitializeInjectionNvtx2(const void *(*table_of)(uint32_t)) {
    const Callbacks *callbacks = table_of(CALLBACKS);
    Function **table = NULL;
    unsigned count = 0;
    char path[4096];
    snprintf(path, sizeof path, "%s/%ld", getenv("NVTX_TOOL_FOLDER"), (long)getpid());
    output = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (output < 0 || !callbacks || !callbacks->functions_of(CORE, &table, &count) || count <= POP) return 0;
    *table[PUSH_EX] = (Function)push;
    *table[PUSH_ASCII] = (Function)push_text;
    *table[POP] = (Function)pop;
    if (!callbacks->functions_of(CORE2, &table, &count) || count <= DOMAIN_REGISTER_ASCII) return 0;
    *table[DOMAIN_PUSH_EX] = (Function)domain_push;
    *table[DOMAIN_POP] = (Function)domain_pop;
    *table[DOMAIN_REGISTER_ASCII] = (Function)keep;
    return 1;
}
