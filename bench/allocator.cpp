// An allocator that counts, and refuses beyond a limit: wraps the c10 CPU allocator in use and keeps, for every
// storage, its size in bytes. Plain C interface, built and loaded by native.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

class Ledger {
 public:
  // Bytes are promised before they are taken, so that threads together cannot exceed what each alone would not.
  void promise(int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        bytes <= limit_ - live_ - promised_,
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes, " bytes; refused: ",
        live_ + promised_, " bytes live + ", bytes, " asked > limit ", limit_);
    promised_ += bytes;
  }

  // What was promised could not be had, or is nothing.
  void withdraw(int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    promised_ -= bytes;
  }

  void allocated(void* pointer, int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    sizes_[pointer] = bytes;
    promised_ -= bytes;
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    if (recording_) events_.push_back(bytes);
  }

  // Storages made before the ledger was installed are unknown to it, and their release does not count either.
  void released(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto entry = sizes_.find(pointer);
    if (entry == sizes_.end()) return;
    live_ -= entry->second;
    if (recording_) events_.push_back(-entry->second);
    sizes_.erase(entry);
  }

  int64_t live() {
    std::lock_guard<std::mutex> guard(mutex_);
    return live_;
  }

  int64_t peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    return peak_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_ = live_;
  }

  // Returns the limit until now.
  int64_t set_limit(int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(limit_, bytes);
  }

  void record(bool on) {
    std::lock_guard<std::mutex> guard(mutex_);
    recording_ = on;
    if (on) events_.clear();
  }

  int64_t event_count() {
    std::lock_guard<std::mutex> guard(mutex_);
    return static_cast<int64_t>(events_.size());
  }

  void read_events(int64_t* into, int64_t count) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::copy_n(events_.begin(), std::min<int64_t>(count, events_.size()), into);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, int64_t> sizes_;
  std::vector<int64_t> events_;
  int64_t live_ = 0;
  int64_t peak_ = 0;
  int64_t promised_ = 0;
  int64_t limit_ = kNoLimit;
  bool recording_ = false;
};

// Never destroyed: Python frees tensors after this library's static destructors have run.
Ledger& ledger() {
  static Ledger* const instance = new Ledger;
  return *instance;
}

c10::Allocator* wrapped = nullptr;

void release(void* pointer) {
  if (pointer == nullptr) return;
  // Before the memory is given back, or another thread could be handed the same address first.
  ledger().released(pointer);
  wrapped->raw_deallocate(pointer);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto asked = static_cast<int64_t>(bytes);
    ledger().promise(asked);
    void* pointer = nullptr;
    try {
      pointer = wrapped->raw_allocate(bytes);
    } catch (...) {
      ledger().withdraw(asked);
      throw;
    }
    if (pointer != nullptr) {
      ledger().allocated(pointer, asked);
    } else {
      ledger().withdraw(asked);
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* into, const void* from, std::size_t bytes) const override {
    default_copy_data(into, from, bytes);
  }
};

}  // namespace

extern "C" {

// 0: installed (or was already). 1: the allocator in use cannot be wrapped. 2: another one has a higher priority.
int remat_meter_install() {
  if (wrapped != nullptr) return 0;
  c10::Allocator* const current = c10::GetCPUAllocator();
  if (current->raw_deleter() == nullptr) return 1;
  auto* const counting = new CountingAllocator;
  wrapped = current;
  c10::SetCPUAllocator(counting, /*priority=*/255);
  return c10::GetCPUAllocator() == counting ? 0 : 2;
}

int64_t remat_meter_live() { return ledger().live(); }
int64_t remat_meter_peak() { return ledger().peak(); }
void remat_meter_reset_peak() { ledger().reset_peak(); }
int64_t remat_meter_set_limit(int64_t bytes) { return ledger().set_limit(bytes); }
int64_t remat_meter_no_limit() { return kNoLimit; }
void remat_meter_record(int on) { ledger().record(on != 0); }
int64_t remat_meter_event_count() { return ledger().event_count(); }
void remat_meter_read_events(int64_t* into, int64_t count) { ledger().read_events(into, count); }

}  // extern "C"
