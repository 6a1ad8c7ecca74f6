// Base64 is decoded as one digit after another says, and long strings are cut from JSON where they are.
#include <memory>
#include <string>
#include <vector>

#include "input.hpp"
#include "serving/pictures.hpp"

using namespace jurybox;

namespace {

bool decoded_slowly(std::string_view text, std::string& out) {
    if (text.size() % 4) return false;
    const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (std::size_t i = 0; i < text.size(); i += 4) {
        const bool last = i + 4 == text.size();
        const int padding = last && text[i + 3] == '=' ? (text[i + 2] == '=' ? 2 : 1) : 0;
        std::uint32_t value = 0;
        for (int k = 0; k < 4; ++k) {
            const std::size_t digit = k < 4 - padding ? digits.find(text[i + static_cast<std::size_t>(k)]) : 0;
            if (digit == std::string::npos) return false;
            value = value << 6 | static_cast<std::uint32_t>(digit);
        }
        for (int k = 0; k < 3 - padding; ++k) out.push_back(static_cast<char>(value >> (16 - 8 * k)));
    }
    return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    // A copy of the exact size, so that the sanitizer sees a step too far.
    const std::unique_ptr<std::uint8_t[]> text(new std::uint8_t[size]);
    std::copy(data, data + size, text.get());
    const std::size_t room = base64::decoded_size(text.get(), size);
    const std::unique_ptr<std::uint8_t[]> out(new std::uint8_t[room]);
    std::string slow;
    const bool whole = base64::decode(out.get(), text.get(), size);
    CHECK(whole == decoded_slowly({reinterpret_cast<const char*>(text.get()), size}, slow));
    if (whole) CHECK(slow == std::string(out.get(), out.get() + room));
    json::Cut cut;
    const auto* json = reinterpret_cast<const char*>(text.get());
    if (json::cut(json, size, 8, cut)) {
        std::size_t removed = 0, at = 0;
        for (const auto& [start, length] : cut.texts) {
            CHECK(start > at && start + length < size && length >= 8 && json[start - 1] == '"' && json[start + length] == '"');
            removed += length + 2, at = start + length;
        }
        CHECK(cut.rest.size() == size - removed + 3 * cut.texts.size());
    }
    return 0;
}
