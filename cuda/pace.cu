// A named piece of the program that takes longer than it does: its stream is kept busy.
//
// The clock is %globaltimer, in nanoseconds. One thread waits; other streams run undisturbed.

typedef unsigned long long u64;
typedef long long i64;

#ifndef DEVICE_TIME
static __device__ __forceinline__ u64 device_time() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
static __device__ __forceinline__ void nap(unsigned ns) { __nanosleep(ns); }
#endif

// When a stream got here.
extern "C" __global__ void note(u64* at) { *(volatile u64*)at = device_time(); }

// Keep the stream busy for `more` times as long as it has taken since a note, at most `limit_ns`.
// `spent` counts what was added.
extern "C" __global__ void stretch(const u64* since, double more, u64 limit_ns, u64* spent) {
    u64 began = device_time(), now = began;
    u64 passed = now - *(const volatile u64*)since;
    double wanted = (double)passed * more;
    u64 length = wanted > (double)limit_ns ? limit_ns : (u64)wanted;
    while (now - began < length) {
        // Naps end late by up to twice their length: none near the end.
        if (length - (now - began) > 4000) nap(200);
        now = device_time();
    }
    *spent += now - began;
}
