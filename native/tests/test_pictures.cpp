// Pixels of four bytes become three, and base64 bytes; nothing outside of either is read or written.
#include <string>
#include <vector>

#include "check.hpp"
#include "serving/pictures.hpp"

using namespace jurybox;

namespace {

void every_fourth_byte_goes_and_no_other_is_touched() {
    for (std::size_t pixels = 0; pixels < 40; ++pixels) {
        // On the heap and of the exact size, so that the address sanitizer sees a byte too many.
        std::vector<std::uint8_t> from(4 * pixels), to(3 * pixels);
        for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 7 + 1);
        drop_fourth(to.data(), from.data(), pixels);
        for (std::size_t i = 0; i < pixels; ++i)
            for (std::size_t c = 0; c < 3; ++c) CHECK(to[3 * i + c] == from[4 * i + c]);
    }
}

bool decodes(const std::string& text, const std::string& bytes) {
    const std::vector<std::uint8_t> given(text.begin(), text.end());
    std::vector<std::uint8_t> to(base64::decoded_size(given.data(), given.size()));
    return base64::decode(to.data(), given.data(), given.size()) && std::string(to.begin(), to.end()) == bytes;
}

void base64_is_taken_whole_or_not() {
    CHECK(decodes("", "") && decodes("Zg==", "f") && decodes("Zm8=", "fo") && decodes("Zm9v", "foo"));
    CHECK(decodes("Zm9vYmFy", "foobar") && decodes("+/+/", "\xfb\xff\xbf"));
    for (const char* wrong : {"Z", "Zg", "Zg=", "Zg===", "====", "Zg==Zg==", "Z=9v", "Zm9v\n", "Zm-v", "Z\xc3\xa9v", "=", "=m9v", "Zm=v", "===v"})
        CHECK(!decodes(wrong, "f") && !decodes(wrong, "foo"));
}

}  // namespace

int main() {
    every_fourth_byte_goes_and_no_other_is_touched();
    base64_is_taken_whole_or_not();
}
