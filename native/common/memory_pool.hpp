// Memory of large arrays that are made, used and dropped all the time, handed out again once nobody holds it.
//
// The kernel clears every page that it gives, and a page fault comes with each: for a batch of 12 MB that costs several
// times the copy into it. So a block that came back is kept for the next one of its size, up to a bound.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <deque>
#include <iterator>
#include <mutex>
#include <new>

namespace jurybox {

class MemoryPool {
  public:
    // keep: bytes that nobody holds and that are not given back to the kernel.
    explicit MemoryPool(std::size_t keep) : keep_(keep) {}
    MemoryPool(const MemoryPool&) = delete;
    MemoryPool& operator=(const MemoryPool&) = delete;
    ~MemoryPool() {
        for (const Block& block : free_) release(block);
    }

    // Memory of so many bytes, aligned to a page, with whatever was in it before; nullptr where there is none.
    std::byte* take(std::size_t bytes) {
        bytes = rounded(bytes);
        {
            // Only tried: in a forked child another thread of the parent may have left it locked for good.
            const std::unique_lock<std::mutex> hold(mutex_, std::try_to_lock);
            if (hold)
                for (auto block = free_.rbegin(); block != free_.rend(); ++block)  // the warmest first
                    if (block->bytes == bytes) {
                        std::byte* memory = block->memory;
                        free_.erase(std::next(block).base());
                        kept_ -= bytes;
                        return memory;
                    }
        }
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        madvise(memory, bytes, MADV_HUGEPAGE);  // fewer faults where the kernel has huge pages; it may refuse
        return static_cast<std::byte*>(memory);
    }

    // What `take(bytes)` gave, by the last who held it.
    void give(std::byte* memory, std::size_t bytes) noexcept {
        const Block block{memory, rounded(bytes)};
        if (block.bytes <= keep_) {
            const std::unique_lock<std::mutex> hold(mutex_, std::try_to_lock);
            if (hold) {
                try {
                    free_.push_back(block);
                } catch (const std::bad_alloc&) {
                    release(block);
                    return;
                }
                kept_ += block.bytes;
                while (kept_ > keep_) {  // sizes that nobody asks for any more
                    kept_ -= free_.front().bytes;
                    release(free_.front());
                    free_.pop_front();
                }
                return;
            }
        }
        release(block);
    }

    std::size_t kept() const {
        const std::lock_guard<std::mutex> hold(mutex_);
        return kept_;
    }

  private:
    struct Block {
        std::byte* memory;
        std::size_t bytes;
    };
    static std::size_t rounded(std::size_t bytes) {
        constexpr std::size_t page = 4096;
        return bytes == 0 ? page : (bytes + page - 1) / page * page;
    }
    static void release(const Block& block) { munmap(block.memory, block.bytes); }

    const std::size_t keep_;
    mutable std::mutex mutex_;
    std::deque<Block> free_;  // the one given last at the end
    std::size_t kept_ = 0;
};

}  // namespace jurybox
