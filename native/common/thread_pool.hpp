// A thread pool: its threads and the caller share the parts of a job. They start with the first job and sleep between jobs.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace jurybox {

class ThreadPool {
  public:
    explicit ThreadPool(std::size_t threads) : threads_(threads) {}
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;
    ~ThreadPool() {
        {
            const std::lock_guard<std::mutex> hold(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    std::size_t threads() const { return threads_; }

    // Run part(0) .. part(parts - 1), also in the caller's thread; return when all are done.
    void run(std::size_t parts, const std::function<void(std::size_t)>& part) {
        if (threads_ <= 1 || parts <= 1) {
            for (std::size_t i = 0; i < parts; ++i) part(i);
            return;
        }
        const std::lock_guard<std::mutex> one_job(jobs_);
        try {
            while (workers_.size() + 1 < threads_) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {  // no more threads can be created: the existing ones do the work
        }
        {
            const std::lock_guard<std::mutex> hold(mutex_);
            part_ = &part;
            parts_ = parts;
            next_.store(0, std::memory_order_relaxed);
            ++job_;
        }
        wake_.notify_all();
        take_parts(part, parts);
        std::unique_lock<std::mutex> hold(mutex_);
        part_ = nullptr;  // threads that have not started yet find nothing to do
        idle_.wait(hold, [this] { return busy_ == 0; });
    }

  private:
    void take_parts(const std::function<void(std::size_t)>& part, std::size_t parts) {
        for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < parts;) part(i);
    }
    void work() {
        std::size_t seen = 0;
        std::unique_lock<std::mutex> hold(mutex_);
        while (true) {
            wake_.wait(hold, [&] { return stop_ || (job_ != seen && part_ != nullptr); });
            if (stop_) return;
            seen = job_;
            const auto* part = part_;
            const std::size_t parts = parts_;
            ++busy_;
            hold.unlock();
            take_parts(*part, parts);
            hold.lock();
            if (--busy_ == 0) idle_.notify_one();
        }
    }

    const std::size_t threads_;
    std::mutex jobs_;  // one job at a time
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    const std::function<void(std::size_t)>* part_ = nullptr;
    std::size_t parts_ = 0, job_ = 0, busy_ = 0;
    std::atomic<std::size_t> next_{0};
    bool stop_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace jurybox
