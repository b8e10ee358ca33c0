#include "kernels/gdn/cuda/segment_tables.h"

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <vector>

#include "hybridcp/error.h"
#include "kernels/gdn/cuda/launch.h"

namespace hybridcp::gdn {
namespace {

template <typename Entry>
void append(std::vector<std::int32_t>& words, const std::vector<Entry>& entries) {
    static_assert(sizeof(Entry) % sizeof(std::int32_t) == 0);
    const std::size_t begin = words.size();
    words.resize(begin + entries.size() * sizeof(Entry) / sizeof(std::int32_t));
    if (!entries.empty()) {
        std::memcpy(words.data() + begin, entries.data(), entries.size() * sizeof(Entry));
    }
}

}  // namespace

std::shared_ptr<const SegmentTables> segment_tables(const GdnSegments& segments,
                                                    const at::Device& device,
                                                    std::int64_t value_heads,
                                                    std::int64_t chunks_of_two_summary_parts,
                                                    double kept_share) {
    std::shared_ptr<const void>& kept = segments.backend_tables();
    std::vector<std::shared_ptr<const SegmentTables>> all;
    if (kept != nullptr) {
        all = *std::static_pointer_cast<const decltype(all)>(kept);
    }
    for (const auto& tables : all) {
        if (tables->device == device && tables->value_heads == value_heads &&
            tables->chunks_of_two_summary_parts == chunks_of_two_summary_parts &&
            tables->kept_share == kept_share) {
            return tables;
        }
    }
    cuda::DeviceTraits traits{};
    const char* error = cuda::read_device_traits(device.index(), traits);
    HCP_CHECK(error == nullptr, "gdn: device {}: {}", device.index(), error);
    const HostTables host =
        make_host_tables(segments.offsets(), value_heads, traits.multiprocessors,
                         chunks_of_two_summary_parts, kept_share);
    std::vector<std::int32_t> words;
    append(words, host.chunks);
    append(words, host.pieces);
    append(words, host.whole_segments);
    append(words, host.summary_parts);
    append(words, host.runs);
    append(words, host.joins);
    append(words, host.first_checkpoints);
    auto tables = std::make_shared<SegmentTables>();
    tables->memory =
        at::from_blob(words.data(), {static_cast<std::int64_t>(words.size())}, at::kInt)
            .to(device, at::kInt, /*non_blocking=*/false, /*copy=*/true);
    tables->device = device;
    tables->value_heads = value_heads;
    tables->chunks_of_two_summary_parts = chunks_of_two_summary_parts;
    tables->num_chunks = static_cast<std::int32_t>(host.chunks.size());
    tables->num_pieces = static_cast<std::int32_t>(host.pieces.size());
    tables->num_whole_segments = static_cast<std::int32_t>(host.whole_segments.size());
    tables->num_runs = static_cast<std::int32_t>(host.runs.size());
    tables->num_summary_parts = static_cast<std::int32_t>(host.summary_parts.size());
    tables->kept_share = kept_share;
    tables->num_checkpoints = host.num_checkpoints;
    tables->cut = host.cut;
    tables->num_joins = static_cast<std::int32_t>(host.joins.size());
    tables->num_slots = host.num_slots;
    tables->empty_segments = host.empty_segments;
    all.push_back(tables);
    kept = std::make_shared<const decltype(all)>(all);
    return tables;
}

}  // namespace hybridcp::gdn
