// Performs a pruned communication: the lists of moves that prismreplay/plugin makes and checks.
//
// The grid is [channels, programs]. A program is one party (a sandbox rank, or the assistant in
// one of its places); its channels share out every span between them and do not meet. Blocks wait
// for each other, within a launch and across devices, so all of them must fit on their devices at
// once; who launches sees to that.
//
// A link has, per channel, an inbox of `slots` slots and a count `ready` of filled ones in the
// receiver's memory, and a count `credit` of emptied ones in the sender's. Counts only grow, over
// all launches; each side keeps its own beside them. Every wait has a time limit: the first block
// to give up says in `report` what it waited for, all others of the launch stop with it, and
// nothing that the launch was to write can be relied on.

#include "elements.cuh"

#ifndef REDUCTION
#define REDUCTION REDUCE_SUM
#endif

#define MOST_LINKS 32
#define FLAG_STRIDE 16  // In counts: a line of its own for each, 128 bytes.

#define PART_SOURCE 0
#define PART_DATA 1
#define PART_IDENTITY 2
#define NO_REDUCTION (-1)

// `send_each` and `receive_each` are a channel's elements: both ends of a link have the same.
struct Move {
    i64 send_link, send_at, send_count, send_each, send_part;
    i64 receive_link, receive_at, receive_count, receive_each, own_at, own_part;
};

// Links are numbers in the launch's tables; a program's own are next to each other.
struct Program {
    i64 first_move, moves;
    i64 first_out, outs, first_in, ins;
    i64 role, unused;
};

// Both sides of a link look alike: `flag` is read here, `peer_flag` is written there, `inbox` is
// where the bytes go or come from.
struct Link {
    u64* flag;
    u64* peer_flag;
    u64* count;
    char* inbox;
};

struct Buffers {
    const Stored* source;
    Stored* data;
};

#define REPORT_FREE 0ull
#define REPORT_MADE 1ull
struct Report {
    u64 state, program, channel, move, receives, link, wanted, found;
};

#ifdef __CUDA_ARCH__
DEVICE u64 load_acquire(const u64* from) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
DEVICE void store_release(u64* to, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
DEVICE u64 device_time() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
DEVICE void fence() { __threadfence_system(); }
DEVICE uint4 load_vector(const uint4* from) { return __ldcg(from); }
#endif

// --- reductions --------------------------------------------------------------------------------

template <typename Type>
DEVICE Type larger(Type one, Type other) { return one < other ? other : one; }
template <typename Type>
DEVICE Type smaller(Type one, Type other) { return other < one ? other : one; }

DEVICE Stored reduced(Stored one, Stored other) {
#if REDUCTION == REDUCE_AND
    return one & other;
#elif REDUCTION == REDUCE_OR
    return one | other;
#elif REDUCTION == REDUCE_XOR
    return one ^ other;
#else
    Wide a = Element::widen(one), b = Element::widen(other);
#if REDUCTION == REDUCE_SUM
    return Element::narrow((Wide)(a + b));
#elif REDUCTION == REDUCE_PRODUCT
    return Element::narrow((Wide)(a * b));
#elif REDUCTION == REDUCE_MAX
    return Element::narrow(a != a ? a : b != b ? b : larger(a, b));
#else
    return Element::narrow(a != a ? a : b != b ? b : smaller(a, b));
#endif
#endif
}

// --- spans -------------------------------------------------------------------------------------

DEVICE i64 smallest(i64 one, i64 other) { return one < other ? one : other; }

DEVICE bool aligned(const void* one, const void* other) {
    return (((u64)one | (u64)other) & 15) == 0;
}

// What this channel has of a span.
struct Share {
    i64 from, count;
};

DEVICE Share share_of(i64 count, i64 each) {
    i64 from = smallest(each * blockIdx.x, count);
    return Share{from, smallest(each, count - from)};
}

// Several vectors are under way at a time: a load may not pass a store that could be to its place.
#define UNROLL 4

DEVICE void copy(Stored* to, const Stored* from, i64 count) {
    i64 done = 0;
    if (aligned(to, from)) {
        const uint4* given = (const uint4*)from;
        uint4* kept = (uint4*)to;
        const i64 vectors = count / VECTOR, lanes = blockDim.x;
        i64 at = threadIdx.x;
        for (; at + (UNROLL - 1) * lanes < vectors; at += UNROLL * lanes) {
            uint4 part[UNROLL];
#pragma unroll
            for (int turn = 0; turn < UNROLL; ++turn)
                part[turn] = load_vector(given + at + turn * lanes);
#pragma unroll
            for (int turn = 0; turn < UNROLL; ++turn) kept[at + turn * lanes] = part[turn];
        }
        for (; at < vectors; at += lanes) kept[at] = load_vector(given + at);
        done = vectors * VECTOR;
    }
    for (i64 at = done + threadIdx.x; at < count; at += blockDim.x) to[at] = from[at];
}

DEVICE uint4 reduced_vector(const uint4& one, const uint4& other) {
    Vector a, b;
    a.all = one;
    b.all = other;
#pragma unroll
    for (int place = 0; place < VECTOR; ++place)
        a.each[place] = reduced(a.each[place], b.each[place]);
    return a.all;
}

DEVICE void reduce(Stored* to, const Stored* from, const Stored* own, i64 count) {
    i64 done = 0;
    if (aligned(to, from) && aligned(own, own)) {
        const uint4 *given = (const uint4*)from, *mine = (const uint4*)own;
        uint4* kept = (uint4*)to;
        const i64 vectors = count / VECTOR, lanes = blockDim.x;
        i64 at = threadIdx.x;
        for (; at + (UNROLL - 1) * lanes < vectors; at += UNROLL * lanes) {
            uint4 one[UNROLL], other[UNROLL];
#pragma unroll
            for (int turn = 0; turn < UNROLL; ++turn) {
                one[turn] = load_vector(given + at + turn * lanes);
                other[turn] = load_vector(mine + at + turn * lanes);
            }
#pragma unroll
            for (int turn = 0; turn < UNROLL; ++turn)
                kept[at + turn * lanes] = reduced_vector(one[turn], other[turn]);
        }
        for (; at < vectors; at += lanes)
            kept[at] = reduced_vector(load_vector(given + at), load_vector(mine + at));
        done = vectors * VECTOR;
    }
    for (i64 at = done + threadIdx.x; at < count; at += blockDim.x)
        to[at] = reduced(from[at], own[at]);
}

DEVICE void fill(Stored* to, Stored value, i64 count) {
    for (i64 at = threadIdx.x; at < count; at += blockDim.x) to[at] = value;
}

// --- waiting -----------------------------------------------------------------------------------

struct Launch {
    Report* report;
    u64 limit_ns;
    i64 slots, slot_elements;
};

// By one thread. False if the wait took too long, here or in another block.
DEVICE bool arrived(
    const Launch& launch, const u64* flag, u64 wanted, i64 move, int receives, i64 link
) {
    u64 found = load_acquire(flag);
    if (found >= wanted) return true;
    const u64 start = device_time();
    for (u32 turn = 1;; ++turn) {
        found = load_acquire(flag);
        if (found >= wanted) return true;
        if (turn % 64 != 0) continue;
        if (load_acquire(&launch.report->state) != REPORT_FREE) return false;
        if (device_time() - start < launch.limit_ns) continue;
        if (atomicCAS(&launch.report->state, REPORT_FREE, REPORT_MADE) == REPORT_FREE) {
            Report* report = launch.report;
            report->program = blockIdx.y;
            report->channel = blockIdx.x;
            report->move = (u64)move;
            report->receives = (u64)receives;
            report->link = (u64)link;
            report->wanted = wanted;
            report->found = found;
        }
        return false;
    }
}

// --- the kernel --------------------------------------------------------------------------------

// `tables` are Programs, then Moves, Links out and Links in, at these places in 8-byte words.
// `buffers` are per role, null where all programs have `source` and `data`; `slots` is a power of
// two; `identity` is a value's bits.
extern "C" __global__ void __launch_bounds__(512, 1) perform(
    const i64* tables, i64 moves_at, i64 outs_at, i64 ins_at, const Buffers* buffers,
    const Stored* source, Stored* data, Report* report, u64 limit_ns, i64 slots,
    i64 slot_elements, u64 identity
) {
    __shared__ u64 sent[MOST_LINKS], taken[MOST_LINKS];
    __shared__ Link outs[MOST_LINKS], ins[MOST_LINKS];
    __shared__ bool going;

    const Program program = ((const Program*)tables)[blockIdx.y];
    const Move* moves = (const Move*)(tables + moves_at) + program.first_move;
    const Launch launch = {report, limit_ns, slots, slot_elements};
    const u64 channel = blockIdx.x;
    if (buffers != nullptr) {
        source = buffers[program.role].source;
        data = buffers[program.role].data;
    }
    for (int link = threadIdx.x; link < program.outs; link += blockDim.x) {
        outs[link] = ((const Link*)(tables + outs_at))[program.first_out + link];
        sent[link] = outs[link].count[channel * FLAG_STRIDE];
    }
    for (int link = threadIdx.x; link < program.ins; link += blockDim.x) {
        ins[link] = ((const Link*)(tables + ins_at))[program.first_in + link];
        taken[link] = ins[link].count[channel * FLAG_STRIDE];
    }
    __syncthreads();

    if (program.moves == 0) return;
    Move move, following = moves[0];
    for (i64 number = 0; number < program.moves; ++number) {
        move = following;
        // Read early: after each arrival, the first-level cache is empty.
        if (number + 1 < program.moves) following = moves[number + 1];
        const Share sends = share_of(move.send_count, move.send_each);
        const Share gets = share_of(move.receive_count, move.receive_each);
        for (i64 at = 0; at < sends.count || at < gets.count; at += slot_elements) {
            if (at < sends.count) {
                const Link link = outs[move.send_link];
                const i64 count = smallest(sends.count - at, slot_elements);
                if (threadIdx.x == 0) {
                    u64 next = sent[move.send_link] + 1;
                    // Nothing to wait for until the inbox has been full once.
                    going = next <= (u64)slots
                            || arrived(launch, link.flag + channel * FLAG_STRIDE,
                                       next - (u64)slots, number, 0, move.send_link);
                }
                __syncthreads();
                if (!going) return;
                const u64 slot = sent[move.send_link] & (u64)(slots - 1);
                Stored* to = (Stored*)link.inbox
                             + (i64)(channel * (u64)slots + slot) * slot_elements;
                const i64 from = move.send_at + sends.from + at;
                if (move.send_part == PART_SOURCE) copy(to, source + from, count);
                else if (move.send_part == PART_DATA) copy(to, data + from, count);
                else fill(to, (Stored)*(const Stored*)&identity, count);
                __syncthreads();
                if (threadIdx.x == 0) {
                    fence();
                    store_release(link.peer_flag + channel * FLAG_STRIDE,
                                  ++sent[move.send_link]);
                }
            }
            if (at < gets.count) {
                const Link link = ins[move.receive_link];
                const i64 count = smallest(gets.count - at, slot_elements);
                if (threadIdx.x == 0)
                    going = arrived(launch, link.flag + channel * FLAG_STRIDE,
                                    taken[move.receive_link] + 1, number, 1, move.receive_link);
                __syncthreads();
                if (!going) return;
                const u64 slot = taken[move.receive_link] & (u64)(slots - 1);
                const Stored* from = (const Stored*)link.inbox
                                     + (i64)(channel * (u64)slots + slot) * slot_elements;
                Stored* to = data + move.receive_at + gets.from + at;
                if (move.own_at == NO_REDUCTION) {
                    copy(to, from, count);
                } else {
                    const Stored* own = move.own_part == PART_SOURCE ? source : data;
                    reduce(to, from, own + move.own_at + gets.from + at, count);
                }
                __syncthreads();
                if (threadIdx.x == 0)
                    store_release(link.peer_flag + channel * FLAG_STRIDE,
                                  ++taken[move.receive_link]);
            }
        }
    }
    __syncthreads();
    for (int link = threadIdx.x; link < program.outs; link += blockDim.x)
        outs[link].count[channel * FLAG_STRIDE] = sent[link];
    for (int link = threadIdx.x; link < program.ins; link += blockDim.x)
        ins[link].count[channel * FLAG_STRIDE] = taken[link];
}
