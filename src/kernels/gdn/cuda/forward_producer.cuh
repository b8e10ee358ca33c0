#pragma once

// The producer warpgroup of the forward kernel. With outputs warp 0 loads K and Q, warp 1 scans the
// gates, warp 2 loads V; without, warp 0 loads K and V, warps 1 and 2 scan the gates of every other
// chunk. Warp 3 stores what the state warpgroup stages.

#include "kernels/gdn/cuda/forward_runs.cuh"
#include "kernels/gdn/cuda/pieces.cuh"

namespace hybridcp::gdn::cuda::HCP_OPERANDS {

/// Zeroes the rows from `rows` on of `panels` panels that a copy has written. The whole warp calls.
HCP_DEVICE void zero_rows(uint32_t tile, uint32_t panels, int32_t rows) {
    for (uint32_t panel = 0; panel < panels; ++panel) {
        const uint32_t end = tile + (panel + 1) * kPanelBytes;
        uint32_t at = tile + panel * kPanelBytes + static_cast<uint32_t>(rows) * 128;
        for (at += device::lane_index() * 16; at < end; at += 512) {
            device::store_shared(at, device::Word4{0, 0, 0, 0});
        }
    }
    device::fence_proxy_async();
    device::sync_warp();
}

/// Makes `load(barrier)` fill a tile of `panels` panels and completes `full`. A tile with rows
/// beyond the chunk lands on a barrier of its own first, and those rows are zeroed.
template <class Load>
HCP_DEVICE void fill_tile(
    uint32_t tile, uint32_t panels, int32_t rows, uint32_t full, uint32_t landing, Load load) {
    const bool leader = device::lane_index() == 0;
    const bool is_short = rows < kChunkTokens;
    const uint32_t barrier = is_short ? landing : full;
    if (leader) {
        device::mbarrier_arrive_expect(barrier, panels * kPanelBytes);
        load(barrier);
    }
    if (is_short) {  // the last chunk of the walk
        device::mbarrier_wait(landing, 0);
        zero_rows(tile, panels, rows);
        if (device::arrives_for_warp()) {
            device::mbarrier_arrive(full);
        }
    } else {
        device::arrive_beside_copy(full);
    }
    device::sync_warp();
}

template <class Config>
struct ForwardProducer {
    const ForwardParams& p;
    const Walk& walk;
    const ForwardShared<Config>& shared;
    bool identity;  // kSummary: v is zero

    /// Each block loads a panel for both.
    HCP_DEVICE void load_half(const device::TensorMap* map,
                              uint32_t tile,
                              uint32_t barrier,
                              int32_t token) {
        constexpr uint16_t kBoth = 3;
        const auto rank = static_cast<int32_t>(shared.rank);
        device::tensor_load_multicast(tile + shared.rank * kPanelBytes, map, barrier,
                                      {64 * rank, walk.key_head, token}, kBoth);
    }

    HCP_DEVICE void load_keys(int i) {
        const Chunk chunk = walk.chunk(i);
        shared.template wait_empty<Config::kKeyEmpty, Config::kKeys>(i);
        fill_tile(shared.keys(i), 2, chunk.tokens,
                  shared.template barrier<Config::kKeyFull, Config::kKeys>(i),
                  shared.barrier(Config::kLanding),
                  [&](uint32_t barrier) { load_half(&p.k, shared.keys(i), barrier, chunk.token); });
    }
    HCP_DEVICE void load_queries(int i) {
        const int m = i - walk.catch_up();
        if (m < 0) {
            return;
        }
        const Chunk chunk = walk.chunk(i);
        shared.wait_queries_empty(i, m);
        fill_tile(shared.queries(i), 2, chunk.tokens,
                  shared.template barrier<Config::kQueryFull, Config::kQueries>(i),
                  shared.barrier(Config::kLanding + 1), [&](uint32_t barrier) {
                      load_half(&p.q, shared.queries(i), barrier, chunk.token);
                  });
    }
    HCP_DEVICE void load_values(int i) {
        const uint32_t full = shared.template barrier<Config::kValueFull, Config::kValues>(i);
        shared.template wait_empty<Config::kValueEmpty, Config::kValues>(i);
        if (Config::kSummary && identity) {
            if (i < Config::kValues) {
                zero_rows(shared.values(i), 1, 0);
            }
            if (device::arrives_for_warp()) {
                device::mbarrier_arrive(full);
            }
            return;
        }
        const Chunk chunk = walk.chunk(i);
        fill_tile(shared.values(i), 1, chunk.tokens, full, shared.barrier(Config::kLanding + 2),
                  [&](uint32_t barrier) {
                      device::tensor_load(
                          shared.values(i), &p.v, barrier,
                          {64 * static_cast<int32_t>(shared.rank), walk.head, chunk.token});
                  });
    }

    /// K as far ahead of V as its ring has more stages.
    HCP_DEVICE void load_keys_and_values() {
        constexpr int kAhead = Config::kKeys - Config::kValues;
        for (int i = 0; i < walk.count() + kAhead; ++i) {
            if (i < walk.count()) {
                load_keys(i);
            }
            if (i >= kAhead) {
                load_values(i - kAhead);
            }
        }
    }

    /// Gates are brought into the second-level cache so many chunks ahead. Not with outputs, where
    /// this loop should be short, for the instruction cache.
    static constexpr int kGatesAhead = 4;
    /// Without outputs a chunk takes less time than its gates do.
    static constexpr int kGateWarps = Config::kOutput ? 1 : 2;

    /// The chunks of one of the gate warps.
    HCP_DEVICE void scan(int first) {
        const int count = walk.count();
        RawGates next =
            first < count ? load_gates(p.gates, walk.chunk(first), walk.head) : RawGates{};
        for (int i = first; i < count; i += kGateWarps) {
            const RawGates raw = next;
            if (!Config::kOutput && i + kGatesAhead < count) {
                prefetch_gates(p.gates, walk.chunk(i + kGatesAhead), walk.head);
            }
            if (i + kGateWarps < count) {
                next = load_gates(p.gates, walk.chunk(i + kGateWarps), walk.head);
            }
            ChunkGates gates = scan_gates(raw);
            const float decay = device::exp2_approximate(gates.all);
            if (Config::kSummary && identity) {  // its decay is one factor, taken at the end
                gates.sum[0] = gates.sum[1] = gates.all = 0.0F;
            }
            shared.template wait_empty<Config::kGateEmpty, Config::kGates>(i);
            write_gates(shared.gates(i), gates, decay);
            device::arrive_warp(shared.template barrier<Config::kGateFull, Config::kGates>(i));
        }
    }

    HCP_DEVICE static void write_gates(uint32_t stage, const ChunkGates& gates, float chunk_decay) {
        const uint32_t lane = device::lane_index();
        const auto write = [&](uint32_t field, float first, float second) {
            device::store_shared(stage + 4 * field + 8 * lane, device::Float2{first, second});
        };
        const float s0 = gates.sum[0], s1 = gates.sum[1];
        const auto decay = [](float x) { return device::exp2_approximate(x); };
        write(kSumField, s0, s1);
        write(kGammaField, decay(s0), decay(s1));
        write(kBetaField, gates.beta[0], gates.beta[1]);
        write(kRestField, decay(gates.all - s0), decay(gates.all - s1));
        const float own = device::shuffle(s0, lane & 24);
        write(kRowField, decay(s0 - own), decay(s1 - own));
#pragma unroll
        for (uint32_t block = 1; block < 4; ++block) {
            const float anchor = device::shuffle(s0, 8 * block);
            const bool before = lane < 8 * block;
            write(kColumnField + 64 * (block - 1), before ? decay(anchor - s0) : 0.0F,
                  before ? decay(anchor - s1) : 0.0F);
        }
        if (lane == 0) {
            device::store_shared(stage + 4 * kDecayField, chunk_decay);
        }
    }

    /// What the state warpgroup hands over with each chunk and once after the last: the output of
    /// the chunk before, and H and E of the chunk if they are kept, in the places of K and V.
    HCP_DEVICE void store_output() {
        int i = walk.catch_up();
        if (i == walk.count()) {
            return;
        }
        if constexpr (Config::kKeep) {
            mark_kept(p, walk);
        }
        KeptChunks kept;
        kept.first = kept.stop = Config::kKeep ? 0 : walk.count();
        while (i < walk.count()) {
            if constexpr (Config::kKeep) {
                kept.go_to(p, walk, i);
            }
            for (; i < kept.first; ++i) {
                store_handed_over<false>(i);
            }
            if (Config::kKeep && i < kept.stop) [[unlikely]] {
                for (; i < kept.stop; ++i) {
                    store_handed_over<true>(i);
                }
            }
        }
        store_handed_over<false>(i);
        device::bulk_wait<0>();
    }
    template <bool kKept>
    HCP_DEVICE void store_handed_over(int i) {
        constexpr uint32_t kSleepNs = 20;
        device::mbarrier_wait_sleeping(shared.barrier(Config::kStagedFull),
                                       (i - walk.catch_up()) & 1, kSleepNs);
        if (i > walk.catch_up()) {
            store_panel(p.o, shared.staged(0), walk.chunk(i - 1), walk.head,
                        static_cast<int32_t>(shared.rank));
        }
        if constexpr (kKept) {
            store_images(i, shared.keys(i));
        }
        if (device::lane_index() == 0) {
            device::bulk_commit();
            device::bulk_wait_read<0>();
            device::mbarrier_arrive(shared.barrier(Config::kStagedEmpty));
        }
        device::sync_warp();
        if constexpr (kKept) {
            release_places(i);
        }
    }
    /// By the warp: H from `state`, E from V's stage.
    HCP_DEVICE void store_images(int i, uint32_t state) {
        const int64_t tile = walk.head * int64_t{p.shape.num_chunks} + walk.global_chunk(i);
        if (device::lane_index() == 0) {
            device::bulk_store(
                p.states + (tile * kStateBytes + shared.rank * Config::kTileBytes) / 2, state,
                Config::kTileBytes);
        }
        const int32_t group = p.shape.group();
        const ErrorPlace place(walk.key_head, walk.head - walk.key_head * group, group);
        store_panel(p.errors[place.index], shared.values(i), walk.chunk(i), place.head,
                    static_cast<int32_t>(shared.rank));
    }
    /// In the place of the state warps, which left E and, with outputs, H there.
    HCP_DEVICE void release_places(int i) {
        device::in_place_of_warps<4>([&] {
            device::mbarrier_arrive(
                shared.template barrier<Config::kValueEmpty, Config::kValues>(i));
            if constexpr (Config::kOutput) {
                arrive_at_both(shared.template barrier<Config::kKeyEmpty, Config::kKeys>(i));
            }
        });
    }

    HCP_DEVICE void store_remade() {
        constexpr uint32_t kSleepNs = 20;
        for (int i = 0; i < walk.count(); ++i) {
            device::mbarrier_wait_sleeping(
                shared.template barrier<Config::kStagedFull, Config::kStaged>(i),
                shared.template parity<Config::kStaged>(i), kSleepNs);
            store_images(i, shared.staged(i));
            if (device::lane_index() == 0) {
                device::bulk_commit();
                device::bulk_wait_read<0>();
                device::mbarrier_arrive(
                    shared.template barrier<Config::kStagedEmpty, Config::kStaged>(i));
            }
            device::sync_warp();
            release_places(i);
        }
        device::bulk_wait<0>();
    }

    HCP_DEVICE void run_with_output(uint32_t warp) {
        if (warp == 0) {
            for (int i = 0; i < walk.count(); ++i) {
                load_keys(i);
                load_queries(i);
            }
        } else if (warp == 1) {
            scan(0);
        } else if (warp == 2) {
            for (int i = 0; i < walk.count(); ++i) {
                load_values(i);
            }
        } else {
            store_output();
        }
    }
    HCP_DEVICE void run_without_output(uint32_t warp) {
        if (warp == 0) {
            load_keys_and_values();
        } else if (warp < 3) {
            scan(static_cast<int>(warp) - 1);
        } else if constexpr (Config::kRemake) {
            store_remade();
        }
    }
    HCP_DEVICE void run() {
        const uint32_t warp = device::shuffle(device::warp_index() % 4, 0);
        if constexpr (Config::kOutput) {
            run_with_output(warp);
        } else {
            run_without_output(warp);
        }
    }
};

}  // namespace hybridcp::gdn::cuda::HCP_OPERANDS
