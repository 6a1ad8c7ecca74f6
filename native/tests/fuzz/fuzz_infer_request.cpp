// A request is cut at its top level, or left to protobuf: the parts lie within it, and written again they are the same.
#include <string>

#include "gateway/fast_lane.hpp"
#include "input.hpp"

using namespace jurybox;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string copy(reinterpret_cast<const char*>(data), size);
    InferParts parts;
    if (!parts.cut(copy)) return 0;
    const auto inside = [&](std::string_view part) { return part.empty() || (part.data() >= copy.data() && part.data() + part.size() <= copy.data() + copy.size()); };
    CHECK(parts.head.size() <= InferParts::kMostHead && parts.raw.size() <= InferParts::kMostRaw && inside(parts.id));
    std::string again = parts.head;
    if (!parts.id.empty()) again += InferParts::prefix(InferParts::kId, parts.id.size()) + std::string(parts.id);
    for (const std::string_view raw : parts.raw) {
        CHECK(inside(raw));
        again += InferParts::prefix(InferParts::kRawIn, raw.size()) + std::string(raw);
    }
    InferParts second;
    CHECK(second.cut(again) && second.head == parts.head && second.id == parts.id && second.raw == parts.raw);
    return 0;
}
