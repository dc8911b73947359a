// Enough of CUDA to run the plugin's kernels on the host: a block is one thread of one lane.
//
// With one lane a block needs no barrier, and shared memory is the thread's own. Blocks of a grid
// run as threads side by side, so blocks that wait for each other do so as on a device.

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local
#define __syncthreads()

struct uint4 {
    unsigned int x, y, z, w;
};
struct Three {
    unsigned int x = 1, y = 1, z = 1;
};
static thread_local Three threadIdx, blockIdx, blockDim, gridDim;

template <typename Type>
static Type atomicCAS(Type* at, Type expected, Type wanted) {
    __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
static unsigned long long load_acquire(const unsigned long long* from) {
    static thread_local unsigned turn = 0;
    if (++turn % 16 == 0) sched_yield();
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
static void store_release(unsigned long long* to, unsigned long long value) {
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
static unsigned long long device_time() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
static unsigned long long load(const unsigned long long* from) { return load_acquire(from); }
static void store(unsigned long long* to, unsigned long long value) { store_release(to, value); }
static void nap(unsigned) { sched_yield(); }
static long long from_lane(long long value, unsigned) { return value; }
static void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static uint4 load_vector(const uint4* from) { return *from; }

template <typename Kernel>
struct Block {
    unsigned x, y, columns, rows, lanes;
    const Kernel* kernel;
    pthread_t thread;
};

template <typename Kernel>
static void* run_block(void* given) {
    const Block<Kernel>& block = *(const Block<Kernel>*)given;
    gridDim.x = block.columns, gridDim.y = block.rows, blockDim.x = block.lanes;
    blockIdx.x = block.x, blockIdx.y = block.y;
    for (unsigned lane = 0; lane < block.lanes; ++lane) {
        threadIdx.x = lane;
        (*block.kernel)();
    }
    return nullptr;
}

// All blocks at once, each with so many lanes after each other (one, if lanes meet).
template <typename Kernel>
static void run_grid(unsigned columns, unsigned rows, unsigned lanes, Kernel kernel) {
    Block<Kernel>* blocks = (Block<Kernel>*)malloc(columns * rows * sizeof(Block<Kernel>));
    for (unsigned number = 0; number < columns * rows; ++number) {
        unsigned x = number % columns, y = number / columns;
        blocks[number] = {x, y, columns, rows, lanes, &kernel, 0};
        pthread_create(&blocks[number].thread, nullptr, run_block<Kernel>, &blocks[number]);
    }
    for (unsigned number = 0; number < columns * rows; ++number)
        pthread_join(blocks[number].thread, nullptr);
    free(blocks);
}
