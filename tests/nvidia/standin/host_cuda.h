/*
 * Runs CUDA C on the CPU: what a kernel file leaves out between "the GPU" and "end of the GPU".
 *
 * Blocks run one after the other, each on a simulated SM whose shared memory and registers are bytes of a file, so that
 * what one kernel leaves there, the next one finds, in whatever process. The threads of a block run one after the other
 * too; in a kernel with barriers each is a fibre of its own that is resumed when all have arrived. So every interleaving
 * is legal, though only one is seen. Memory that no allocation covers is not mapped: touching it ends the launch, as it
 * does on a GPU.
 *
 * Plain C with GNU extensions, as kernel files must be; compiled by tests/nvidia/hostkernels.py together with one thunk
 * for each kernel.
 */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE /* it takes a jump between fibres for an overrun stack */
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define HOST_CUDA

typedef struct {
    unsigned long long x, y;
} __attribute__((aligned(16))) ulonglong2;

struct host_index {
    unsigned x, y, z;
};

/* A simulated SM: its number, where its memories are, and a byte of them that does not stay as it is written. */
struct host_sm {
    unsigned id;
    void *shared;
    unsigned *registers; /* HOST_REGISTERS for each thread of a block */
    volatile unsigned char *stuck; /* NULL, or changes whenever all threads have arrived at a barrier */
};

typedef void (*host_thunk)(void *const *arguments);

struct host_launch {
    host_thunk kernel;
    void *const *arguments;
    bool barriers;
    struct host_index grid, block;
    const struct host_sm *sms; /* blocks are dealt out to them in turn */
    unsigned sm_count;
    unsigned sm_ids; /* %nsmid */
};

enum { HOST_STUCK = 0xA5, HOST_REGISTERS = 256, HOST_STACK = 32 * 1024, HOST_MOST_THREADS = 1024 };

static struct host_index threadIdx, blockIdx, blockDim, gridDim;
static const struct host_sm *host_sm;
static unsigned host_sm_ids;
static unsigned long long host_clock, host_clock_step;

#define KERNEL static void
#define KERNEL_OF(threads) static void
#define DEVICE static inline __attribute__((unused))
#define DYNAMIC_SHARED(type, name) type *name = host_sm->shared
#define __shared__ static

#define __popcll(word) ((unsigned)__builtin_popcountll(word))
#define __ffsll(word) __builtin_ffsll(word)
#define atomicAdd(address, value) __atomic_fetch_add((address), (value), __ATOMIC_RELAXED)
#define atomicOr(address, value) __atomic_fetch_or((address), (value), __ATOMIC_RELAXED)
#define atomicMin(address, value) (*(address) = *(address) < (value) ? *(address) : (value))
#define atomicMax(address, value) (*(address) = *(address) > (value) ? *(address) : (value))

DEVICE ulonglong2 load16(const ulonglong2 *p) { return *p; }
DEVICE void store16(ulonglong2 *p, ulonglong2 value) { *p = value; }
DEVICE unsigned sm_id(void) { return host_sm->id; }
DEVICE unsigned sm_ids(void) { return host_sm_ids; }

/* Blocks that wait for each other would wait for ever here, so each look at the clock finds it twice as far on. */
DEVICE long long clock64(void)
{
    host_clock += host_clock_step;
    if (host_clock_step < 1ull << 61) host_clock_step *= 2;
    return (long long)host_clock;
}

DEVICE unsigned *host_registers(void) { return host_sm->registers + (size_t)threadIdx.x * HOST_REGISTERS; }

/* --- the register file, for kernels that name their registers one by one */

#define HOST_NAMED_REGISTERS 240

DEVICE void registers_keep(unsigned load, const volatile unsigned *shared)
{
    for (unsigned i = 0; load != 0 && i < HOST_NAMED_REGISTERS; i++) host_registers()[i] = *shared;
}

DEVICE void registers_load(const volatile unsigned *shared) { registers_keep(1, shared); }

DEVICE unsigned registers_nonzero(unsigned mask)
{
    const unsigned char *bytes = (const unsigned char *)host_registers();
    unsigned count = 0;
    for (unsigned i = 0; mask != 0 && i < HOST_NAMED_REGISTERS * sizeof(unsigned); i++) count += bytes[i] != 0;
    return count;
}

DEVICE unsigned registers_equal(unsigned mask, unsigned wanted)
{
    unsigned count = 0;
    for (unsigned i = 0; i < HOST_NAMED_REGISTERS; i++) count += (host_registers()[i] & mask) == wanted;
    return count;
}

/* --- fibres */

struct host_fibre {
    ucontext_t start;
    jmp_buf at;
    bool started, over;
    void *stack;
};

static struct host_fibre host_fibres[HOST_MOST_THREADS];
static struct host_fibre *host_fibre; /* the one that runs; NULL in kernels without barriers */
static const struct host_launch *host_running;
static jmp_buf host_scheduler;

static void __syncthreads(void) __attribute__((unused));
static void __syncthreads(void)
{
    if (_setjmp(host_fibre->at) == 0) _longjmp(host_scheduler, 1);
}

static void host_fibre_main(void)
{
    host_running->kernel(host_running->arguments);
    host_fibre->over = true;
    _longjmp(host_scheduler, 1);
}

static bool host_prepare(struct host_fibre *fibre)
{
    if (fibre->stack == NULL) fibre->stack = malloc(HOST_STACK);
    if (fibre->stack == NULL || getcontext(&fibre->start) != 0) return false;
    fibre->start.uc_stack.ss_sp = fibre->stack;
    fibre->start.uc_stack.ss_size = HOST_STACK;
    fibre->start.uc_link = NULL;
    makecontext(&fibre->start, host_fibre_main, 0);
    fibre->started = fibre->over = false;
    return true;
}

static void host_resume(struct host_fibre *fibre)
{
    if (_setjmp(host_scheduler) != 0) return;
    if (fibre->started) _longjmp(fibre->at, 1);
    fibre->started = true;
    setcontext(&fibre->start);
}

static void host_thread_is(unsigned index, const struct host_index *block)
{
    threadIdx.x = index % block->x;
    threadIdx.y = index / block->x % block->y;
    threadIdx.z = index / block->x / block->y;
}

static bool host_block(const struct host_launch *launch)
{
    const unsigned threads = launch->block.x * launch->block.y * launch->block.z;
    if (!launch->barriers) {
        for (unsigned i = 0; i < threads; i++) {
            host_thread_is(i, &launch->block);
            launch->kernel(launch->arguments);
        }
        return true;
    }
    for (unsigned i = 0; i < threads; i++)
        if (!host_prepare(&host_fibres[i])) return false;
    for (unsigned left = threads; left > 0;) {
        left = 0;
        for (unsigned i = 0; i < threads; i++) {
            if (host_fibres[i].over) continue;
            host_fibre = &host_fibres[i];
            host_thread_is(i, &launch->block);
            host_resume(host_fibre);
            left += !host_fibres[i].over;
        }
        if (host_sm->stuck != NULL) *host_sm->stuck = HOST_STUCK;
    }
    host_fibre = NULL;
    return true;
}

/* --- a launch */

static sigjmp_buf host_fault;
static void *volatile host_fault_address;

static void host_faulted(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)context;
    host_fault_address = info->si_addr;
    siglongjmp(host_fault, 1);
}

/* 0: done; 1: a thread touched memory that is not there, whose address is in `fault`; 2: no memory for the fibres. */
int host_run(const struct host_launch *launch, void **fault);
int host_run(const struct host_launch *launch, void **fault)
{
    static _Alignas(16) char stack[64 * 1024];
    const stack_t mine = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_sigaction = host_faulted, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    struct sigaction segv, bus;
    stack_t theirs;
    volatile int result = 0;
    sigaltstack(&mine, &theirs);
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    host_running = launch;
    blockDim = launch->block;
    gridDim = launch->grid;
    host_sm_ids = launch->sm_ids;
    host_clock = 0;
    host_clock_step = 1024;
    if (sigsetjmp(host_fault, 1) == 0) {
        unsigned dealt = 0;
        for (blockIdx.z = 0; blockIdx.z < gridDim.z && result == 0; blockIdx.z++)
            for (blockIdx.y = 0; blockIdx.y < gridDim.y && result == 0; blockIdx.y++)
                for (blockIdx.x = 0; blockIdx.x < gridDim.x && result == 0; blockIdx.x++) {
                    host_sm = &launch->sms[dealt++ % launch->sm_count];
                    host_clock_step = 1024;
                    if (!host_block(launch)) result = 2;
                }
    } else {
        *fault = host_fault_address;
        result = 1;
    }
    sigaction(SIGSEGV, &segv, NULL);
    sigaction(SIGBUS, &bus, NULL);
    sigaltstack(&theirs, NULL);
    return result;
}
