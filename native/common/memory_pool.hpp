// A pool of memory blocks for large arrays that are created and dropped frequently.
//
// The kernel clears every page that it allocates, at a page fault each: for a batch of 12 MB that takes several times as
// long as the copy into it. So a released block is kept for the next request of its size, up to a limit.
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
    // keep: the maximum number of unused bytes that are not returned to the kernel.
    explicit MemoryPool(std::size_t keep) : keep_(keep) {}
    MemoryPool(const MemoryPool&) = delete;
    MemoryPool& operator=(const MemoryPool&) = delete;
    ~MemoryPool() {
        for (const Block& block : free_) release(block);
    }

    // Return page-aligned memory with arbitrary contents; nullptr if there is none.
    std::byte* take(std::size_t bytes) {
        bytes = rounded(bytes);
        {
            // try_lock, since in a forked child another thread of the parent may have left it locked forever.
            const std::unique_lock<std::mutex> hold(mutex_, std::try_to_lock);
            if (hold)
                for (auto block = free_.rbegin(); block != free_.rend(); ++block)  // the most recently used first
                    if (block->bytes == bytes) {
                        std::byte* memory = block->memory;
                        free_.erase(std::next(block).base());
                        kept_ -= bytes;
                        return memory;
                    }
        }
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        madvise(memory, bytes, MADV_HUGEPAGE);  // fewer page faults if the kernel has huge pages; it may refuse
        return static_cast<std::byte*>(memory);
    }

    // Release memory of `take(bytes)`.
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
                while (kept_ > keep_) {  // probably sizes that are no longer requested
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
    std::deque<Block> free_;  // in the order of release
    std::size_t kept_ = 0;
};

}  // namespace jurybox
