// What a fuzzer's input says: numbers first, then bytes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "../check.hpp"

class Input {
  public:
    Input(const std::uint8_t* data, std::size_t size) : data_(reinterpret_cast<const char*>(data), size) {}
    // The next byte; 0 at the end.
    std::uint8_t byte() {
        if (data_.empty()) return 0;
        const auto first = static_cast<std::uint8_t>(data_[0]);
        data_.remove_prefix(1);
        return first;
    }
    std::string_view take(std::size_t size) {
        const std::string_view part = data_.substr(0, size);
        data_.remove_prefix(part.size());
        return part;
    }
    std::string_view rest() { return take(data_.size()); }
    bool over() const { return data_.empty(); }

  private:
    std::string_view data_;
};
