#include "simt/tensor_box.h"

#include <cstring>

#include "simt/swizzle.h"

namespace hybridcp::simt {
namespace {

// Calls visit(place in the box's bytes, element of the tensor or null outside) for each element.
template <class Visit>
void for_each_element(const TensorMap& map,
                      device::TensorPosition position,
                      uint32_t offset,
                      Visit visit) {
    const uint32_t row_bytes = map.box[0] * map.element_bytes;
    const auto inside = [&](int64_t index, int dimension) {
        return index >= 0 && index < int64_t{map.extent[static_cast<std::size_t>(dimension)]};
    };
    for (uint32_t z = 0; z < map.box[2]; ++z) {
        for (uint32_t y = 0; y < map.box[1]; ++y) {
            for (uint32_t x = 0; x < map.box[0]; ++x) {
                const int64_t at_x = int64_t{position.x} + x;
                const int64_t at_y = int64_t{position.y} + y;
                const int64_t at_z = int64_t{position.z} + z;
                uint32_t place = (z * map.box[1] + y) * row_bytes + x * map.element_bytes;
                if (map.swizzle_128) {
                    place = swizzle_128(offset + place) - offset;
                }
                std::byte* element = nullptr;
                if (inside(at_x, 0) && inside(at_y, 1) && inside(at_z, 2)) {
                    element = map.data + at_x * map.element_bytes +
                              at_y * static_cast<int64_t>(map.stride_bytes[0]) +
                              at_z * static_cast<int64_t>(map.stride_bytes[1]);
                }
                visit(place, element);
            }
        }
    }
}

}  // namespace

uint32_t box_bytes(const TensorMap& map) {
    return map.box[0] * map.box[1] * map.box[2] * map.element_bytes;
}

std::vector<std::byte> read_box(const TensorMap& map,
                                device::TensorPosition position,
                                uint32_t offset) {
    std::vector<std::byte> data(box_bytes(map));
    for_each_element(map, position, offset, [&](uint32_t place, const std::byte* element) {
        if (element != nullptr) {
            std::memcpy(&data[place], element, map.element_bytes);
        }
    });
    return data;
}

void write_box(const TensorMap& map,
               device::TensorPosition position,
               uint32_t offset,
               const std::vector<std::byte>& data) {
    for_each_element(map, position, offset, [&](uint32_t place, std::byte* element) {
        if (element != nullptr) {
            std::memcpy(element, &data[place], map.element_bytes);
        }
    });
}

}  // namespace hybridcp::simt
