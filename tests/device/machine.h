// The simulated machine: what is counted and controlled, memory, layouts, transfer queues, devices and their buffers.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pjrt_declarations.h"

using Dims = std::vector<int64_t>;
using Lock = std::unique_lock<std::mutex>;

// PJRT's structs that a plugin defines. The first two begin with a pointer that JAX may look at in later versions.

struct PJRT_Error {
  const void* vtable = nullptr;
  uint32_t code;
  std::string message;
};

struct PJRT_Memory {
  const void* vtable = nullptr;
  int id;
  int place;  // DEVICE or PINNED
  std::string kind, text;
  PJRT_Device* device;
};

struct PJRT_DeviceDescription {
  int id;
  int process;
  int local;
  std::string text;
};

struct PJRT_Client {
  int process = 0;
  std::string platform;
  std::vector<PJRT_Device*> devices, addressable;
  std::vector<PJRT_Memory*> memories;
};

enum Place { HOST, DEVICE, PINNED, PLACES };
const char* const kPlaceNames[PLACES] = {"host", "device", "pinned"};
const char* const kMemoryKinds[PLACES] = {"unpinned_host", "device", "pinned_host"};

enum Direction { OUT, IN, DIRECTIONS };  // seen from the device
const char* const kDirectionNames[DIRECTIONS] = {"out", "in"};

constexpr int kPoison = 0xDD;
constexpr size_t kMostQuarantined = size_t{64} << 20;
constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

PJRT_Error* Fail(uint32_t code, std::string message) { return new PJRT_Error{nullptr, code, std::move(message)}; }

std::string Setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

// ---------------------------------------------------------------------------------------------------------------------
// What is counted, logged and controlled.

struct Record {
  std::string what;  // enqueued, started, finished, failed, deleted, or a mark of the program
  int64_t transfer = -1;
  int from = HOST, to = HOST, device = -1;
  size_t bytes = 0;
};

struct Amount {
  int64_t count = 0, bytes = 0;
};

struct UnderWay {
  Amount now, most;
};

struct Live {
  size_t now = 0, most = 0, capacity = kUnlimited;
};

// One for the whole process, never destroyed: threads may still use it while the process ends.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Record> log;
  std::map<std::string, int64_t> counters;
  std::array<std::array<Amount, PLACES>, PLACES> moved;
  std::array<UnderWay, DIRECTIONS> under_way;
  std::array<Live, PLACES> live;
  std::array<bool, DIRECTIONS> held{};
  std::array<int64_t, DIRECTIONS> permits{};  // transfers that may begin although others are held
  std::array<double, DIRECTIONS> bytes_per_second{};  // 0: as fast as memory allows
  std::set<int64_t> failing;  // numbers of transfers that are to fail
  int64_t next_number = 0;
  std::atomic<bool> poisons{true}, touches{false}, column_major{false};
  std::string device_kind = "Simulated";

  void Add(Record record) {
    log.push_back(std::move(record));
    changed.notify_all();
  }
};

State& state = *new State;

void Count(const std::string& name, int64_t by = 1) {
  Lock lock(state.mutex);
  state.counters[name] += by;
}

// ---------------------------------------------------------------------------------------------------------------------
// Events: something that will be ready, or has failed.

class Promise {
 public:
  void Set(uint32_t code = PJRT_Error_Code_OK, const std::string& message = "") {
    std::vector<std::function<void()>> callbacks;
    {
      Lock lock(mutex_);
      ready_ = true;
      code_ = code;
      message_ = message;
      callbacks.swap(callbacks_);
    }
    changed_.notify_all();
    for (auto& callback : callbacks) callback();
  }

  bool ready() {
    Lock lock(mutex_);
    return ready_;
  }

  // Null if all went well. The caller owns the error.
  PJRT_Error* Error() {
    Lock lock(mutex_);
    return code_ == PJRT_Error_Code_OK ? nullptr : Fail(code_, message_);
  }

  PJRT_Error* Wait() {
    {
      Lock lock(mutex_);
      changed_.wait(lock, [this] { return ready_; });
    }
    return Error();
  }

  void WhenReady(std::function<void()> callback) {
    {
      Lock lock(mutex_);
      if (!ready_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
  uint32_t code_ = PJRT_Error_Code_OK;
  std::string message_;
  std::vector<std::function<void()>> callbacks_;
};

using PromisePtr = std::shared_ptr<Promise>;

// ---------------------------------------------------------------------------------------------------------------------
// Memory.

// Freed memory stays for a while, poisoned: whoever still looks at it sees the poison and not other data.
void Quarantine(char* data, size_t bytes) {
  static auto& kept = *new std::deque<std::pair<char*, size_t>>;
  static size_t total = 0;
  if (!state.poisons) {
    free(data);
    return;
  }
  memset(data, kPoison, bytes);
  Lock lock(state.mutex);
  kept.emplace_back(data, bytes);
  total += bytes;
  while (total > kMostQuarantined) {
    total -= kept.front().second;
    free(kept.front().first);
    kept.pop_front();
  }
}

class Storage {
 public:
  // Null where the memory's capacity does not allow it.
  static std::shared_ptr<Storage> Allocate(size_t bytes, int place) {
    {
      Lock lock(state.mutex);
      Live& live = state.live[place];
      if (live.capacity != kUnlimited && live.now + bytes > live.capacity) return nullptr;
      live.now += bytes;
      live.most = std::max(live.most, live.now);
    }
    return std::shared_ptr<Storage>(new Storage(bytes, place));
  }

  ~Storage() {
    Quarantine(data, bytes);
    Lock lock(state.mutex);
    state.live[place].now -= bytes;
    state.changed.notify_all();
  }

  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  const size_t bytes;
  const int place;
  char* const data;

 private:
  Storage(size_t bytes, int place)
      : bytes(bytes), place(place), data(static_cast<char*>(aligned_alloc(64, (bytes + 64) / 64 * 64))) {
    if (!data) throw std::bad_alloc();
    if (state.touches) memset(data, 0, bytes);
  }
};

using StoragePtr = std::shared_ptr<Storage>;

// ---------------------------------------------------------------------------------------------------------------------
// Shapes and layouts: where the elements of an array lie.

size_t ItemSize(uint32_t type) {
  switch (type) {
    case PJRT_Buffer_Type_C128:
      return 16;
    case PJRT_Buffer_Type_F64:
    case PJRT_Buffer_Type_S64:
    case PJRT_Buffer_Type_U64:
    case PJRT_Buffer_Type_C64:
      return 8;
    case PJRT_Buffer_Type_F32:
    case PJRT_Buffer_Type_S32:
    case PJRT_Buffer_Type_U32:
      return 4;
    case PJRT_Buffer_Type_F16:
    case PJRT_Buffer_Type_BF16:
    case PJRT_Buffer_Type_S16:
    case PJRT_Buffer_Type_U16:
      return 2;
    default:
      return 1;  // types of less than a byte come one to a byte
  }
}

struct Shape {
  size_t item;
  Dims dims;

  size_t bytes() const {
    size_t total = item;
    for (int64_t dim : dims) total *= dim;
    return total;
  }

  Dims Strides(const Dims& minor_to_major) const {
    Dims strides(dims.size());
    int64_t step = item;
    for (int64_t axis : minor_to_major) {
      strides[axis] = step;
      step *= dims[axis];
    }
    return strides;
  }

  Dims RowMajor() const {
    Dims order(dims.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = order.size() - 1 - i;
    return order;
  }

  // The order of arrays that come without a layout.
  Dims DefaultOrder() const {
    Dims order = RowMajor();
    if (state.column_major) std::reverse(order.begin(), order.end());
    return order;
  }
};

// Whether the elements lie in the same places; axes of length one may have any stride.
bool SamePlaces(const Shape& shape, const Dims& one, const Dims& other) {
  for (size_t axis = 0; axis < shape.dims.size(); axis++) {
    if (shape.dims[axis] != 1 && one[axis] != other[axis]) return false;
  }
  return true;
}

void CopyAxis(const Shape& shape, size_t axis, char* to, const Dims& to_strides, const char* from,
              const Dims& from_strides) {
  if (axis == shape.dims.size()) {
    memcpy(to, from, shape.item);
    return;
  }
  for (int64_t i = 0; i < shape.dims[axis]; i++) {
    CopyAxis(shape, axis + 1, to + i * to_strides[axis], to_strides, from + i * from_strides[axis], from_strides);
  }
}

// One side at least has no gaps: the device's.
void Copy(const Shape& shape, char* to, const Dims& to_strides, const char* from, const Dims& from_strides) {
  if (shape.bytes() == 0) return;
  if (SamePlaces(shape, to_strides, from_strides)) {
    memcpy(to, from, shape.bytes());
  } else {
    CopyAxis(shape, 0, to, to_strides, from, from_strides);
  }
}

// Puts the order of a layout, from minor to major, into `order`, which stays as it is where there is no layout.
PJRT_Error* ReadLayout(const PJRT_Buffer_MemoryLayout* layout, Dims* order) {
  if (layout == nullptr) return nullptr;
  if (layout->type != PJRT_Buffer_MemoryLayout_Type_Tiled || layout->tiled.num_tiles > 0) {
    return Fail(PJRT_Error_Code_UNIMPLEMENTED, "the simulated device has neither tiles nor strided layouts");
  }
  order->assign(layout->tiled.minor_to_major, layout->tiled.minor_to_major + layout->tiled.minor_to_major_size);
  return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// Transfers.

using Clock = std::chrono::steady_clock;

struct Transfer {
  int from, to;
  size_t bytes;
  PromisePtr source;                       // ready when the bytes are there; null for host memory
  std::function<void()> copy;              // holds the memory of both sides
  std::function<void(PJRT_Error*)> ended;  // null: it was copied
  int64_t number = 0;
  Clock::time_point possible_from{};
};

// Runs transfers one after another. A thread of its own starts with the first of them.
class Queue {
 public:
  Queue(int device, Direction direction) : device_(device), direction_(direction) {}

  void Push(Transfer transfer) {
    Lock lock(state.mutex);
    transfer.number = state.next_number++;
    transfer.possible_from = Clock::now();
    Amount& moved = state.moved[transfer.from][transfer.to];
    moved.count++;
    moved.bytes += transfer.bytes;
    UnderWay& under_way = state.under_way[direction_];
    under_way.now.count++;
    under_way.now.bytes += transfer.bytes;
    under_way.most.count = std::max(under_way.most.count, under_way.now.count);
    under_way.most.bytes = std::max(under_way.most.bytes, under_way.now.bytes);
    state.counters["enqueued"]++;
    Log("enqueued", transfer);
    waiting_.push_back(std::move(transfer));
    arrived_.notify_one();
    if (!started_) std::thread([this] { Run(); }).detach();
    started_ = true;
  }

 private:
  void Run() {
    for (;;) {
      Transfer transfer = Next();
      PJRT_Error* problem = Begin(transfer);
      if (!problem) transfer.copy();
      if (transfer.from == DEVICE || transfer.to == DEVICE) Pace(transfer);
      transfer.copy = nullptr;  // memory that nothing else holds is free before anyone hears of the end
      End(transfer, problem != nullptr);
      transfer.ended(problem);
      delete problem;
    }
  }

  Transfer Next() {
    Lock lock(state.mutex);
    arrived_.wait(lock, [this] { return !waiting_.empty(); });
    Transfer transfer = std::move(waiting_.front());
    waiting_.pop_front();
    return transfer;
  }

  PJRT_Error* Begin(Transfer& transfer) {
    PJRT_Error* problem = nullptr;
    if (transfer.source) {
      if (!transfer.source->ready()) transfer.possible_from = Clock::time_point::max();
      problem = transfer.source->Wait();
    }
    Lock lock(state.mutex);
    while (state.held[direction_] && state.permits[direction_] == 0) {
      transfer.possible_from = Clock::time_point::max();
      state.changed.wait(lock);
    }
    if (state.held[direction_]) state.permits[direction_]--;
    transfer.possible_from = std::min(transfer.possible_from, Clock::now());
    Log("started", transfer);
    if (state.failing.erase(transfer.number) && !problem) {
      problem = Fail(PJRT_Error_Code_INTERNAL, "transfer " + std::to_string(transfer.number) + " was told to fail");
    }
    return problem;
  }

  // Ends when the bytes are through a link of the given rate. Late wake-ups do not add up.
  void Pace(const Transfer& transfer) {
    double rate;
    {
      Lock lock(state.mutex);
      rate = state.bytes_per_second[direction_];
    }
    if (rate <= 0) return;
    auto takes = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(transfer.bytes / rate));
    free_at_ = std::max(free_at_, transfer.possible_from) + takes;
    std::this_thread::sleep_until(free_at_);
  }

  void End(const Transfer& transfer, bool failed) {
    Lock lock(state.mutex);
    UnderWay& under_way = state.under_way[direction_];
    under_way.now.count--;
    under_way.now.bytes -= transfer.bytes;
    state.counters["finished"]++;
    Log(failed ? "failed" : "finished", transfer);
  }

  void Log(const char* what, const Transfer& transfer) {
    state.Add({what, transfer.number, transfer.from, transfer.to, device_, transfer.bytes});
  }

  const int device_;
  const Direction direction_;
  std::condition_variable arrived_;
  std::deque<Transfer> waiting_;
  bool started_ = false;
  Clock::time_point free_at_{};
};

// ---------------------------------------------------------------------------------------------------------------------
// Devices and buffers.

struct PJRT_Device {
  PJRT_DeviceDescription description;
  bool addressable;
  std::vector<PJRT_Memory*> memories;
  Queue out, in;
};

struct PJRT_Event {
  PromisePtr promise;
};

struct PJRT_Buffer {
  uint32_t type;
  Shape shape;
  Dims minor_to_major;
  PJRT_Memory* memory;
  PromisePtr ready = std::make_shared<Promise>();
  std::shared_ptr<std::atomic<int>> readers = std::make_shared<std::atomic<int>>(0);
  std::mutex mutex;  // for what follows
  StoragePtr storage;
  bool deleted = false;
  int views = 0;

  Dims Strides() const { return shape.Strides(minor_to_major); }

  // The memory, null once deleted; whoever has it may use it for as long as he likes.
  StoragePtr Hold() {
    Lock lock(mutex);
    return deleted ? nullptr : storage;
  }
};

PJRT_Error* Deleted() { return Fail(PJRT_Error_Code_INVALID_ARGUMENT, "Buffer has been deleted or donated."); }

PJRT_Error* NewBuffer(uint32_t type, Shape shape, Dims order, PJRT_Memory* memory, std::unique_ptr<PJRT_Buffer>* made) {
  auto buffer = std::make_unique<PJRT_Buffer>();
  buffer->storage = Storage::Allocate(shape.bytes(), memory->place);
  if (!buffer->storage) {
    Count("allocation_failures");
    return Fail(PJRT_Error_Code_RESOURCE_EXHAUSTED, "Out of memory allocating " + std::to_string(shape.bytes()) +
                                                        " bytes in " + kMemoryKinds[memory->place] + ".");
  }
  buffer->type = type;
  buffer->shape = std::move(shape);
  buffer->minor_to_major = std::move(order);
  buffer->memory = memory;
  *made = std::move(buffer);
  return nullptr;
}

void Settle(const PromisePtr& promise, const PJRT_Error* problem) {
  if (problem) {
    promise->Set(problem->code, problem->message);
  } else {
    promise->Set();
  }
}

PJRT_Error* CopyBuffer(PJRT_Buffer* source, PJRT_Memory* memory, PJRT_Buffer** result) {
  StoragePtr from = source->Hold();
  if (!from) return Deleted();
  std::unique_ptr<PJRT_Buffer> made;
  if (PJRT_Error* error = NewBuffer(source->type, source->shape, source->minor_to_major, memory, &made)) return error;
  Queue& queue = memory->place == DEVICE ? memory->device->in : source->memory->device->out;
  ++*source->readers;
  queue.Push({source->memory->place, memory->place, from->bytes, source->ready,
              [from, to = made->storage] { memcpy(to->data, from->data, from->bytes); },
              [readers = source->readers, ready = made->ready](PJRT_Error* problem) {
                --*readers;
                Settle(ready, problem);
              }});
  *result = made.release();
  return nullptr;
}
