#include "ops/row_messages.h"

namespace hybridcp {

at::Tensor empty_rows(const at::Tensor& like, std::int64_t count) {
    std::vector<std::int64_t> shape = like.sizes().vec();
    shape[0] = count;
    return at::empty(shape, like.options());
}

at::Tensor pack_rows(const at::Tensor& from,
                     const std::vector<RowRun>& runs,
                     std::int64_t RowRun::* at_row) {
    std::vector<at::Tensor> pieces;
    pieces.reserve(runs.size());
    for (const RowRun& run : runs) {
        pieces.push_back(from.narrow(0, run.*at_row, run.count));
    }
    return pieces.size() == 1 ? pieces.front().contiguous() : at::cat(pieces);
}

void add_rows(at::Tensor& into,
              const at::Tensor& message,
              const std::vector<RowRun>& runs,
              std::int64_t RowRun::* at_row) {
    std::int64_t offset = 0;
    for (const RowRun& run : runs) {
        into.narrow(0, run.*at_row, run.count) += message.narrow(0, offset, run.count);
        offset += run.count;
    }
}

}  // namespace hybridcp
