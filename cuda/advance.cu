// One operation of a sandbox rank: when are all members there, and when does it end?
//
// The table of times, the codes and their encoding are described in
// prismreplay/plugin/advance_code.py; prismreplay/plugin/advance_simulation.py does the same in
// Python. One warp per operation: it reads all slots that the code names at once, computes from
// shared memory, and looks again until the operation's own time is known. A limit bounds every
// wait and every hold; who gives up says what was missing, and lets all others go, too.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define MOST_ITEMS 256
#define MOST_TERMS 1024
#define FEW 8  // terms that every lane looks at by itself
#define LAPS 65000
#define FIRST_LAP 1
#define TIME_BITS 48
#define TIME_MASK ((1ull << TIME_BITS) - 1)
#define MOST_LATE 2000000000ll
#define BIAS_NS (1ll << 40)
#define NEVER (-(1ll << 62))
#define UNKNOWN ((i64)(1ull << 63))

#define KIND_NONE 0
#define KIND_FIXED 1
#define KIND_LOCAL 3

#define FINAL_FIRST 1
#define FINAL_SECOND 2

#define DONE 0
#define LATE_SLOT 1
#define OVERWRITTEN 2
#define RELEASED 3

#define STAMPED 1  // `arrive` was launched for the operation
#define OWES 2     // the rank is late by as much as this operation is

#ifdef __CUDA_ARCH__
#define DEVICE static __device__ __forceinline__
DEVICE u64 device_time() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
DEVICE u64 load(const u64* from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
DEVICE void store(u64* to, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
DEVICE void fence() { __threadfence_system(); }
DEVICE void nap(u32 ns) { __nanosleep(ns); }
DEVICE i64 from_lane(i64 value, u32 distance) {
    return __shfl_xor_sync(~0u, value, distance);
}
#else
#define DEVICE static
#endif

// What a launch is told beside its code. Words of 8 bytes, as prismreplay/plugin/advancing.py
// packs them. Times are of the device; `origin_ns` is the run's beginning.
struct Call {
    u64* table[2];  // shared, own
    u64* seen;      // 8 words per ticket, in a ring of `kept`; the first one is written last
    u64* alarm;     // [0]: who gave up (ticket + 1), [1]: all are to go
    u64* debt;      // ns by which the rank is late through no fault of its own
    u64* stamps;    // of `arrive`, in a ring of `kept`
    i64 kept;       // a power of two
    i64 fixed[2], ring[2], rounds, period_ns;
    i64 origin_ns, limit_ns, tail_ns;
    i64 ticket, round, transfer_ns, flags;
};

template <int Words>
struct Code {
    i64 words[Words];
};

struct Place {
    u64* at;
    u64 lap;
};

DEVICE Place find(const Call& call, i64 slot) {
    u32 index = (u32)slot, lap = (u32)(slot >> 32) & 0xffff;
    u32 kind = (u32)(slot >> 48) & 15, table = (u32)(slot >> 52) & 1;
    if (kind == KIND_FIXED) return {call.table[table] + index, lap};
    u32 turns = (u32)call.round - lap - 1, rounds = (u32)call.rounds;
    u32 laps = turns / rounds, turn = turns % rounds;
    i64 at = call.fixed[table] + turn * call.ring[table] + index;
    return {call.table[table] + at, FIRST_LAP + 1 + laps % LAPS};
}

DEVICE void write(const Call& call, i64 slot, i64 time_ns) {
    if (((slot >> 48) & 15) == KIND_NONE) return;
    i64 biased = time_ns + BIAS_NS;
    if (biased < 0) biased = 0;
    if (biased > (i64)TIME_MASK) biased = (i64)TIME_MASK;
    Place place = find(call, slot);
    store(place.at, (u64)biased | place.lap << TIME_BITS);
}

// What one pass over the code found.
struct Found {
    i64 first, second;         // the finals
    i64 missing, missing_at;   // a slot, and which term of the code it is
    i64 overwritten, terms;    // a slot; terms of the chunks before
};

struct Shared {
    i64 terms[MOST_TERMS];    // slot + weight, or UNKNOWN; by term
    i64 results[MOST_ITEMS];  // by item
    i64 arrival, debt, stop, missing;
};

DEVICE bool is_later(u64 there, u64 lap) {
    // Laps count in a circle of LAPS.
    u32 ahead = ((u32)there + LAPS - (u32)lap % LAPS) % LAPS;
    return there != 0 && ahead < LAPS / 2;
}

// Reads all slots of a chunk. Each lane keeps the first that it misses.
DEVICE void read_terms(const Call& call, const i64* terms, u32 count, Shared& shared,
                       Found& found) {
    for (u32 number = threadIdx.x; number < count; number += blockDim.x) {
        i64 slot = terms[2 * number];
        if (((slot >> 48) & 15) == KIND_LOCAL) continue;
        Place place = find(call, slot);
        u64 word = load(place.at), lap = word >> TIME_BITS;
        if (lap == place.lap) {
            shared.terms[number] = (i64)(word & TIME_MASK) - BIAS_NS + terms[2 * number + 1];
            continue;
        }
        shared.terms[number] = UNKNOWN;
        if (found.missing == 0) found.missing = slot, found.missing_at = found.terms + number;
        if (found.overwritten == 0 && is_later(lap, place.lap)) found.overwritten = slot;
    }
    found.terms += count;
}

DEVICE i64 value_of(const i64* terms, u32 number, const Shared& shared) {
    i64 slot = terms[2 * number];
    if (((slot >> 48) & 15) != KIND_LOCAL) return shared.terms[number];
    i64 there = shared.results[(u32)slot];
    return there == UNKNOWN ? UNKNOWN : there + terms[2 * number + 1];
}

// The latest of some terms, or UNKNOWN; all lanes get it.
DEVICE i64 latest_of(const i64* terms, u32 begin, u32 count, const Shared& shared) {
    i64 latest = 0, known = 1;
    u32 lane = count > FEW ? threadIdx.x : 0, step = count > FEW ? blockDim.x : 1;
    for (u32 number = lane; number < count; number += step) {
        i64 value = value_of(terms, begin + number, shared);
        if (value == UNKNOWN) known = 0;
        if (value > latest) latest = value;
    }
    if (count > FEW) {
        for (u32 distance = blockDim.x / 2; distance; distance /= 2) {
            i64 other = from_lane(latest, distance);
            known &= from_lane(known, distance);
            if (other > latest) latest = other;
        }
    }
    return known ? latest : UNKNOWN;
}

// One pass over one chunk; gives where the next one begins.
DEVICE const i64* pass_chunk(const Call& call, const i64* words, Shared& shared, Found& found) {
    u32 items = (u32)words[0], count = (u32)(words[0] >> 32);
    const i64* heads = words + 1;
    const i64* terms = heads + 3 * items;
    read_terms(call, terms, count, shared, found);
    __syncthreads();
    u32 begin = 0;
    for (u32 number = 0; number < items; ++number) {
        i64 head = heads[3 * number], floor = heads[3 * number + 2];
        u32 mine = (u32)head, final = (u32)(head >> 32) & 255;
        i64 value = latest_of(terms, begin, mine, shared);
        begin += mine;
        if (value != UNKNOWN) {
            if (floor != NEVER) {
                i64 least = floor + call.round * call.period_ns;
                if (least > value) value = least;
            }
            if ((head >> 40 & 1) && shared.arrival > value) value = shared.arrival;
            if (threadIdx.x == 0) write(call, heads[3 * number + 1], value);
            if (final == FINAL_FIRST) found.first = value;
            if (final == FINAL_SECOND) found.second = value;
        }
        if (threadIdx.x == 0) shared.results[number] = value;
        __syncthreads();
    }
    return terms + 2 * count;
}

DEVICE bool is_over(const Call& call) { return load(call.alarm) || load(call.alarm + 1); }

// Whether the operation is ready; if so, when. Waits until it is, or gives up.
DEVICE i64 wait_until_ready(const Call& call, const i64* words, Shared& shared, u32& status,
                            i64& missing) {
    u32 chunks = (u32)(words[0] >> 32);
    const i64* first = words + 1 + (u32)words[0];
    status = DONE, missing = 0;
    if (chunks == 0) return shared.arrival;
    u64 begun = device_time();
    for (u32 turn = 0;; ++turn) {
        Found found = {UNKNOWN, UNKNOWN, 0, NEVER, 0, 0};
        const i64* at = first;
        for (u32 chunk = 0; chunk < chunks; ++chunk) at = pass_chunk(call, at, shared, found);
        if (found.first != UNKNOWN) return found.first;
        if (found.second != UNKNOWN) return found.second;
        // Lanes have looked at different slots: all go on or stop together.
        i64 earliest = found.missing ? -found.missing_at : NEVER;
        for (u32 distance = blockDim.x / 2; distance; distance /= 2) {
            i64 other = from_lane(earliest, distance);
            if (other > earliest) earliest = other;
            other = from_lane(found.overwritten, distance);
            if (other > found.overwritten) found.overwritten = other;
        }
        if (found.missing && earliest == -found.missing_at) shared.missing = found.missing;
        if (threadIdx.x == 0) {
            shared.stop = DONE;
            if (found.overwritten != 0) shared.stop = OVERWRITTEN;
            else if (device_time() - begun > (u64)call.limit_ns) shared.stop = LATE_SLOT;
            else if (turn % 32 == 31 && is_over(call)) shared.stop = RELEASED;
        }
        __syncthreads();
        status = (u32)shared.stop;
        __syncthreads();
        if (status != DONE) {
            missing = status == OVERWRITTEN ? found.overwritten : shared.missing;
            return shared.arrival;
        }
        if (turn > 4) nap(turn > 64 ? 500 : 100);
    }
}

// Until a time of the rank, whose debt may change meanwhile; `debt` is the one that counted. As
// hold.cu does. True if somebody let it go before.
DEVICE bool hold(const Call& call, i64 until_ns, i64& debt) {
    i64 now = (i64)device_time(), last = now + call.limit_ns;
    i64 target = call.origin_ns + until_ns + debt;
    for (u32 turn = 1; now < target; ++turn) {
        if (now >= last) return true;
        // Naps end late by up to twice their length, and memory takes its time: none near the
        // target, where no new debt is seen.
        if (target - now > 4000) {
            nap(200);
            if (turn % 256 == 0 && target - now > 100000 && is_over(call)) return true;
            debt = (i64)load(call.debt);
            target = call.origin_ns + until_ns + debt;
        }
        now = (i64)device_time();
    }
    return false;
}

// The arrival's time, known to all from here on.
DEVICE void arrive_at(const Call& call, const i64* words, i64 time_ns) {
    u32 arrivals = (u32)words[0];
    for (u32 number = 0; number < arrivals; ++number) write(call, words[1 + number], time_ns);
}

DEVICE void perform(const Call& call, const i64* words) {
    __shared__ Shared shared;
    u64 began = device_time();
    if (threadIdx.x == 0) {
        shared.debt = (i64)load(call.debt);
        i64 now = (i64)began - call.origin_ns - shared.debt;
        u64* stamp = call.stamps + (call.ticket & (call.kept - 1));
        shared.arrival = call.flags & STAMPED ? (i64)load(stamp) : now;
        arrive_at(call, words, shared.arrival);
    }
    __syncthreads();
    u32 status;
    i64 missing;
    i64 ready = wait_until_ready(call, words, shared, status, missing);
    if (threadIdx.x != 0) return;
    if (ready < shared.arrival) ready = shared.arrival;
    i64 debt = shared.debt, end = ready + call.transfer_ns;
    u64* seen = call.seen + 8 * (call.ticket & (call.kept - 1));
    store(seen + 1, (u64)((i64)began - call.origin_ns - debt));
    store(seen + 2, (u64)shared.arrival);
    store(seen + 3, (u64)ready);
    store(seen + 4, (u64)end);
    store(seen + 5, status);
    store(seen + 6, (u64)missing);
    fence();
    bool cut = hold(call, end - call.tail_ns, debt);
    // From here on, every instruction makes the next kernel late: one word says all.
    i64 late = (i64)device_time() - call.origin_ns - debt + call.tail_ns - end;
    u64 ticket = (u64)(u32)(call.ticket + 1) << 32;
    store(seen, ticket | (u32)(late > MOST_LATE ? MOST_LATE : late < -MOST_LATE ? -MOST_LATE : late));
    if (cut && status == DONE) {
        status = is_over(call) ? RELEASED : LATE_SLOT;
        store(seen + 5, status);
    }
    // Only the warp of one operation at a time makes debts: those of one stream.
    if ((call.flags & OWES) && late > 0 && status == DONE)
        store(call.debt, load(call.debt) + (u64)late);
    if (status == LATE_SLOT || status == OVERWRITTEN) store(call.alarm, (u64)call.ticket + 1);
}

// The arrival of an operation whose `perform` comes later. What follows from it at once is known to
// all from here on; nothing is waited for.
DEVICE void stamp_arrival(const Call& call, const i64* words) {
    __shared__ Shared shared;
    if (threadIdx.x == 0) {
        shared.arrival = (i64)device_time() - call.origin_ns - (i64)load(call.debt);
        store(call.stamps + (call.ticket & (call.kept - 1)), (u64)shared.arrival);
        arrive_at(call, words, shared.arrival);
    }
    __syncthreads();
    Found found = {UNKNOWN, UNKNOWN, 0, NEVER, 0, 0};
    const i64* at = words + 1 + (u32)words[0];
    u32 chunks = (u32)(words[0] >> 32);
    for (u32 chunk = 0; chunk < chunks; ++chunk) at = pass_chunk(call, at, shared, found);
}

// Codes come with the launch; long ones lie in memory that the device can read.
extern "C" __global__ void __launch_bounds__(32)
    advance_96(const __grid_constant__ Call call, const __grid_constant__ Code<96> code) {
    perform(call, code.words);
}
extern "C" __global__ void __launch_bounds__(32)
    advance_448(const __grid_constant__ Call call, const __grid_constant__ Code<448> code) {
    perform(call, code.words);
}
extern "C" __global__ void __launch_bounds__(32)
    advance_far(const __grid_constant__ Call call, const i64* code) {
    perform(call, code);
}

// When the stream got here, as the arrival of an operation that is launched later.
extern "C" __global__ void __launch_bounds__(32)
    arrive_96(const __grid_constant__ Call call, const __grid_constant__ Code<96> code) {
    stamp_arrival(call, code.words);
}
extern "C" __global__ void __launch_bounds__(32)
    arrive_448(const __grid_constant__ Call call, const __grid_constant__ Code<448> code) {
    stamp_arrival(call, code.words);
}
extern "C" __global__ void __launch_bounds__(32)
    arrive_far(const __grid_constant__ Call call, const i64* code) {
    stamp_arrival(call, code);
}

// The rank owes `share` of the time between two stamps; below zero, it is ahead by so much.
extern "C" __global__ void owe(u64* debt, const u64* begin, const u64* end, double share) {
    i64 passed = (i64)(load(end) - load(begin));
    store(debt, load(debt) + (u64)(i64)((double)passed * share));
}

// Answers the host `count` times: box[0] is asked for, box[1] the time, box[2] what was answered.
extern "C" __global__ void answer(u64* box, u64 count, u64 limit_ns) {
    u64 begun = device_time();
    for (u64 number = 1; number <= count; ++number) {
        while (load(box) < number)
            if (device_time() - begun > limit_ns) return;
        store(box + 1, device_time());
        fence();
        store(box + 2, number);
    }
}
