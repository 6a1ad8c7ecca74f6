// No block leads out of its buffers, and what was compressed comes back.
#include <algorithm>
#include <memory>

#include "input.hpp"
#include "replay/archive.hpp"

using namespace jurybox::replay;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    const std::size_t room = (data[0] | data[1] << 8) % 4096 + 1, n = size - 2;
    const std::unique_ptr<std::uint8_t[]> in(new std::uint8_t[n]), out(new std::uint8_t[room]);
    std::copy(data + 2, data + size, in.get());
    lz4::decompress(in.get(), n, out.get(), room);
    if (n == 0) return 0;
    const std::size_t most = n + n / 255 + 16;
    const std::unique_ptr<std::uint8_t[]> packed(new std::uint8_t[most]), back(new std::uint8_t[n]);
    const std::size_t bytes = lz4::compress(in.get(), n, packed.get(), most);
    CHECK(bytes > 0 && bytes <= most);
    CHECK(lz4::decompress(packed.get(), bytes, back.get(), n) && std::equal(in.get(), in.get() + n, back.get()));
    return 0;
}
