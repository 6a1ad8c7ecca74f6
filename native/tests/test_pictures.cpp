// Pixels of four bytes become three, and base64 bytes; nothing outside of either is read or written.
#include <string>
#include <vector>

#include "check.hpp"
#include "serving/pictures.hpp"

using namespace jurybox;

namespace {

void every_fourth_byte_goes_and_no_other_is_touched() {
    for (std::size_t pixels = 0; pixels < 100; ++pixels) {
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

// Every byte at every place of a text that is longer than what is taken at once.
void base64_of_any_length_has_no_wrong_digit() {
    const std::string alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (std::size_t size = 0; size < 80; ++size) {
        std::string bytes, text;
        for (std::size_t i = 0; i < size; ++i) bytes += static_cast<char>(i * 37 + size);
        for (std::size_t i = 0; i < size; i += 3) {
            std::uint32_t three = 0;
            for (std::size_t k = 0; k < 3; ++k) three = three << 8 | (i + k < size ? static_cast<unsigned char>(bytes[i + k]) : 0u);
            for (std::size_t k = 0; k < 4; ++k) text += i + k > size ? '=' : alphabet[three >> (18 - 6 * k) & 63];
        }
        CHECK(decodes(text, bytes));
        for (std::size_t at = 0; at < text.size(); ++at)
            for (int byte = 0; byte < 256; ++byte) {
                if (alphabet.find(static_cast<char>(byte)) != std::string::npos || byte == '=') continue;
                std::string wrong = text;
                wrong[at] = static_cast<char>(byte);
                std::vector<std::uint8_t> given(wrong.begin(), wrong.end()), to(base64::decoded_size(given.data(), given.size()));
                CHECK(!base64::decode(to.data(), given.data(), given.size()));
            }
    }
    for (std::size_t i = 0; i < 64; ++i) {  // and every digit at every place
        const std::string text(32, alphabet[i]);
        std::vector<std::uint8_t> given(text.begin(), text.end()), to(24);
        CHECK(base64::decode(to.data(), given.data(), 32));
        for (std::size_t k = 0; k < 32; ++k) {
            std::uint32_t digit = 0;
            for (std::size_t bit = 6 * k; bit < 6 * k + 6; ++bit) digit = digit << 1 | (to[bit / 8] >> (7 - bit % 8) & 1u);
            CHECK(digit == i);
        }
    }
}

void strings_that_mean_themselves_are_cut_out_of_json() {
    const auto cut = [](const std::string& text, std::size_t least) {
        const std::vector<char> exact(text.begin(), text.end());
        json::Cut found;
        if (!json::cut(exact.data(), exact.size(), least, found)) return std::string("none");
        for (const auto& [start, size] : found.texts) found.rest += "|" + text.substr(start, size);
        return found.rest;
    };
    CHECK(cut(R"({"a": "long", "b": ["x", "longer"]})", 4) == R"({"a": NaN, "b": ["x", NaN]}|long|longer)");
    CHECK(cut(R"(["lo\ng", "lo\"ng", "\\", "long\\"])", 3) == R"(["lo\ng", "lo\"ng", "\\", "long\\"])");
    CHECK(cut("[\"lo\tng\", \"l\xc3\xb6ng\", \"long\"]", 4) == "[\"lo\tng\", \"l\xc3\xb6ng\", NaN]|long");
    CHECK(cut(R"(["NaN", "I", ""])", 4) == R"(["NaN", "I", ""])" && cut("", 0).empty());
    for (const char* wrong : {"[NaN]", "[-Infinity]", "[\"long]", "\"", "[\"lo\\\"", "[\"long\", NaN]"}) CHECK(cut(wrong, 4) == "none");
}

}  // namespace

int main() {
    every_fourth_byte_goes_and_no_other_is_touched();
    base64_is_taken_whole_or_not();
    base64_of_any_length_has_no_wrong_digit();
    strings_that_mean_themselves_are_cut_out_of_json();
}
