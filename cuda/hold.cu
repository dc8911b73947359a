// Keep a stream busy until a point of the device's own time.
//
// The clock is %globaltimer, which counts nanoseconds and, on data-centre GPUs, steps by 32. One
// thread waits; other streams run undisturbed. `limit_ns` bounds every hold: a wrong target must
// not hang a device. Each hold writes two numbers to `seen`: when it ended, and 1 where the limit
// ended it.

typedef unsigned long long u64;
typedef long long i64;

static __device__ __forceinline__ u64 device_time() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

static __device__ __forceinline__ void hold(u64 target, u64 limit_ns, u64* seen) {
    u64 now = device_time(), last = now + limit_ns;
    u64 cut = target > last;
    if (cut) target = last;
    while (now < target) {
        // Naps end late by up to twice their length: none near the target.
        if (target - now > 4000) __nanosleep(200);
        now = device_time();
    }
    if (seen != nullptr) {
        seen[0] = now;
        seen[1] = cut;
    }
}

// When a stream got here.
extern "C" __global__ void stamp(u64* at) { *at = device_time(); }

// For so long, from when the kernel starts.
extern "C" __global__ void hold_for(u64 duration_ns, u64 limit_ns, u64* seen) {
    hold(device_time() + duration_ns, limit_ns, seen);
}

// Until an absolute time.
extern "C" __global__ void hold_until(u64 target_ns, u64 limit_ns, u64* seen) {
    hold(target_ns, limit_ns, seen);
}

// Until so long after the latest of several stamps: of a communication's arrivals, say.
extern "C" __global__ void hold_after(
    const u64* stamps, int count, i64 duration_ns, u64 limit_ns, u64* seen
) {
    u64 latest = 0;
    for (int number = 0; number < count; ++number) {
        u64 one = ((const volatile u64*)stamps)[number];
        if (one > latest) latest = one;
    }
    hold(latest + (u64)duration_ns, limit_ns, seen);
}
