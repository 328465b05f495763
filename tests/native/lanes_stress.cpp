// The engine on a device that works later: every copy, cast and sum is queued on a lane, a thread that takes its time,
// and only the engine's events order the lanes. Ranks are threads; modules are work on the compute lane that reads
// gathered parameters and writes gradients. Under the thread sanitizer, a missing event is a data race even where
// timing hides it. Exit status 0: all values were right.
//
//   lanes_stress [ranks=3] [steps=60] [seed=1]
#include <algorithm>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "fsdp/engine.h"
#include "host/host_device.h"

namespace {

using tt::DType;
using tt::fsdp::Engine;
using tt::fsdp::GradientDestination;
using tt::fsdp::ParamSpec;
using tt::fsdp::Schedule;
using tt::fsdp::ShardPlan;
using tt::fsdp::UnitSpec;
namespace runtime = tt::runtime;

void expect(bool condition, const std::string& what) {
  if (!condition) {
    std::fprintf(stderr, "wrong: %s\n", what.c_str());
    std::_Exit(1);
  }
}

// ---- a device that works later
// ----------------------------------------------------------------------------------------

struct Work {
  std::function<void()> body;
  std::string name;
};

class LaneThread {
 public:
  LaneThread(unsigned seed, std::string name) : name_(std::move(name)), random_(seed), thread_([this] { run(); }) {}
  ~LaneThread() {
    push({});
    thread_.join();
  }
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  void push(Work work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }
  void describe() {
    const std::lock_guard lock(mutex_);
    std::fprintf(stderr, "  %s: %s, %zu waiting\n", name_.c_str(), running_.c_str(), queue_.size());
  }

 private:
  void run() {
    for (;;) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        running_ = "idle";
        changed_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
        running_ = work.name;
      }
      if (!work.body) {
        return;
      }
      if (random_() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
      }
      work.body();
    }
  }

  const std::string name_;
  std::minstd_rand random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  std::string running_;
  std::thread thread_;
};

class Point {
 public:
  void reach() {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  void await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  bool await_for(std::chrono::seconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return reached_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

constexpr const char* kLaneNames[] = {"compute", "gather", "reduce"};

class LaneDevice final : public runtime::Device {
 public:
  LaneDevice(unsigned seed, int rank) {
    for (unsigned lane = 0; lane < 3; ++lane) {
      lanes_.push_back(std::make_unique<LaneThread>(3 * seed + lane, tt::str("rank ", rank, ", ", kLaneNames[lane])));
    }
  }

  // Queues work on the current lane.
  void submit(std::string name, std::function<void()> body) {
    lanes_[current_.back()]->push({std::move(body), std::move(name)});
  }
  void synchronize() {
    for (auto& lane : lanes_) {
      Point done;
      lane->push({[&done] { done.reach(); }, "synchronize"});
      done.await();
    }
  }
  void describe() {
    for (auto& lane : lanes_) {
      lane->describe();
    }
  }

  std::unique_ptr<runtime::Event> make_event() override { return std::make_unique<LaneEvent>(*this); }
  void enter(runtime::Lane lane) override { current_.push_back(1 + static_cast<std::size_t>(lane)); }
  void leave() noexcept override { current_.pop_back(); }

  void cast(std::byte* dst, DType to, const std::byte* src, DType from, std::size_t numel) override {
    submit("cast", [=, this] { host_.cast(dst, to, src, from, numel); });
  }
  void add(std::byte* dst, DType to, const std::byte* src, DType from, std::size_t numel) override {
    submit("add", [=, this] { host_.add(dst, to, src, from, numel); });
  }
  void sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
           const runtime::SumSpec& spec) override {
    const std::vector<const std::byte*> held(sources.begin(), sources.end());
    submit("sum", [=, this] { host_.sum(dst, held, numel, spec); });
  }
  double sum_squares(const std::byte* src, DType dtype, std::size_t numel) override {
    return host_.sum_squares(src, dtype, numel);
  }
  void zero(std::byte* dst, std::size_t bytes) override {
    submit("zero", [=] { std::memset(dst, 0, bytes); });
  }

 private:
  class LaneEvent final : public runtime::Event {
   public:
    explicit LaneEvent(LaneDevice& device) : device_(device) {}
    void record() override {
      last_ = std::make_shared<Point>();
      name_ = tt::str("event ", static_cast<const void*>(this), " of ", kLaneNames[device_.current_.back()]);
      device_.submit("record " + name_, [point = last_] { point->reach(); });
    }
    void wait() override {
      if (last_) {
        device_.submit("wait for " + name_, [point = last_] { point->await(); });
      }
    }

   private:
    LaneDevice& device_;
    std::shared_ptr<Point> last_;
    std::string name_;
  };

  tt::host::HostDevice host_;
  std::vector<std::size_t> current_{0};
  std::vector<std::unique_ptr<LaneThread>> lanes_;
};

// ---- collectives between lanes
// ----------------------------------------------------------------------------------------

// What the ranks share: one barrier per kind of collective, as a communicator of its own has one order.
struct World {
  explicit World(int size)
      : ranks(static_cast<std::size_t>(size)), gathers(size), reductions(size), gather_base(ranks), sent(ranks) {}

  const std::size_t ranks;
  std::barrier<> gathers;
  std::barrier<> reductions;
  std::vector<std::byte*> gather_base;
  std::vector<const std::byte*> sent;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::vector<std::vector<std::uint64_t>>> reported;
  std::map<std::uint64_t, std::uint32_t> units;  // of each gather, by sequence number
};

class LaneCommunicator final : public runtime::Communicator {
 public:
  LaneCommunicator(World& world, int rank, LaneDevice& device) : world_(world), rank_(rank), device_(device) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_.ranks); }
  const char* name() const override { return "lanes"; }
  void allocate(const runtime::MemoryLayout& layout) override {
    gather_.resize(layout.gather_reserved_bytes);
    reduce_.resize(layout.reduce_reserved_bytes);
    for (std::uint32_t place = 0; place < layout.places; ++place) {
      gathered_.emplace_back(device_);
    }
    received_.resize(layout.bucket_params.size());
  }
  std::byte* gather_memory(std::size_t offset) override { return gather_.data() + offset; }
  std::byte* reduce_memory(std::size_t offset) override { return reduce_.data() + offset; }

  bool place_is_free(std::uint32_t place) override { return place < gathered_.size(); }
  void wait_place_free(std::uint32_t place) override { expect(place < gathered_.size(), "place"); }
  void launch_gather(std::uint32_t place, const runtime::Tag& tag,
                     std::span<const runtime::Segments> buckets) override {
    for (const auto& bucket : buckets) {
      device_.submit(tt::str("all-gather ", tag.sequence, " at ", place), [this, bucket] {
        std::byte* mine = gather_.data() + bucket.offset;  // the others may have it at another place
        world_.gather_base[static_cast<std::size_t>(rank_)] = mine;
        world_.gathers.arrive_and_wait();
        for (std::size_t peer = 0; peer < world_.ranks; ++peer) {
          const std::size_t begin = peer * bucket.shard_bytes;
          if (peer != static_cast<std::size_t>(rank_)) {
            std::memcpy(mine + begin, world_.gather_base[peer] + begin, bucket.shard_bytes);
          }
        }
        world_.gathers.arrive_and_wait();
      });
    }
    gathered_[place].record();
    const std::lock_guard lock(world_.mutex);
    const auto [first, is_new] = world_.units.emplace(tag.sequence, tag.unit);
    expect(is_new || first->second == tag.unit, tt::str("gather ", tag.sequence, " is of unit ", tag.unit, " on rank ",
                                                        rank_, ", of unit ", first->second, " on another"));
  }
  void wait_gather(std::uint32_t place, const runtime::Tag& tag) override {
    static_cast<void>(tag);
    gathered_[place].wait();
  }
  void release(std::uint32_t place) override { static_cast<void>(place); }

  bool needs_fixed_order() const override { return true; }
  void launch_reduce(const runtime::Contribution& c) override {
    const std::size_t bytes = c.shard_numel * size_of(c.wire);
    auto& received = received_[c.bucket];
    received.resize(bytes * world_.ranks);
    const bool none = c.offset == runtime::kNoGradient;
    const std::byte* mine = none ? nullptr : reduce_.data() + c.offset;
    device_.submit(tt::str("all-to-all of bucket ", c.bucket, " in round ", c.round), [this, mine, bytes, &received] {
      world_.sent[static_cast<std::size_t>(rank_)] = mine;
      world_.reductions.arrive_and_wait();
      for (std::size_t peer = 0; peer < world_.ranks; ++peer) {
        const std::byte* from = world_.sent[peer];
        if (from == nullptr) {
          std::memset(received.data() + peer * bytes, 0, bytes);
        } else {
          std::memcpy(received.data() + peer * bytes, from + static_cast<std::size_t>(rank_) * bytes, bytes);
        }
      }
      world_.reductions.arrive_and_wait();
    });
    const std::lock_guard lock(world_.mutex);
    auto& all = world_.reported[{c.round, c.bucket}];
    all.push_back(c.reported);
    world_.changed.notify_all();
    segment_bytes_[c.bucket] = bytes;
  }
  void close_round(std::uint64_t round) override { static_cast<void>(round); }
  void abort_round(std::uint64_t, std::span<const runtime::Contribution>) override {}
  bool reduce_is_ready(std::uint32_t bucket, std::uint64_t round) override {
    const std::lock_guard lock(world_.mutex);
    return ready(bucket, round);
  }
  void wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) override {
    std::unique_lock lock(world_.mutex);
    world_.changed.wait(lock, [&] { return ready(bucket, round); });
  }
  bool wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) override {
    std::unique_lock lock(world_.mutex);
    return world_.changed.wait_for(lock, std::chrono::milliseconds(2), [&] { return ready(bucket, round); });
  }
  std::vector<std::uint64_t> reported_anywhere(std::uint32_t bucket, std::uint64_t round) override {
    const std::lock_guard lock(world_.mutex);
    std::vector<std::uint64_t> bits;
    for (const auto& of_rank : world_.reported[{round, bucket}]) {
      bits.resize(of_rank.size());
      for (std::size_t word = 0; word < bits.size(); ++word) {
        bits[word] |= of_rank[word];
      }
    }
    return bits;
  }
  std::vector<const std::byte*> my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) override {
    static_cast<void>(round);
    std::vector<const std::byte*> segments;
    for (std::size_t peer = 0; peer < world_.ranks; ++peer) {
      segments.push_back(received_[bucket].data() + peer * segment_bytes_[bucket]);
    }
    return segments;
  }
  void finish_reduce(std::uint32_t bucket, std::uint64_t round) override { static_cast<void>(bucket + round); }
  bool contribution_is_free(std::uint32_t bucket, std::uint64_t round) override {
    return reduce_is_ready(bucket, round);
  }
  void wait_contribution_free(std::uint32_t bucket, std::uint64_t round) override { wait_reduce_ready(bucket, round); }
  void set_progress(std::function<void()> progress) override { static_cast<void>(progress); }
  void fail(const std::string& why) noexcept override { static_cast<void>(why); }

 private:
  bool ready(std::uint32_t bucket, std::uint64_t round) {
    return world_.reported[{round, bucket}].size() == world_.ranks;
  }

  World& world_;
  const int rank_;
  LaneDevice& device_;
  std::vector<std::byte> gather_;
  std::vector<std::byte> reduce_;
  std::vector<runtime::Mark> gathered_;           // per place
  std::vector<std::vector<std::byte>> received_;  // per bucket
  std::map<std::uint32_t, std::size_t> segment_bytes_;
};

// ---- a model
// ----------------------------------------------------------------------------------------------------------

constexpr std::int64_t kRows[] = {5, 1, 7, 3};
constexpr std::int64_t kRowNumel = 6;

ShardPlan make_plan(int ranks, int units) {
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> specs;
  for (int u = 0; u < units; ++u) {
    UnitSpec unit;
    unit.name = tt::str("unit", u);
    for (int i = 0; i < 3; ++i) {
      ParamSpec param;
      param.name = tt::str(unit.name, ".", i);
      param.rows = kRows[(u + i) % 4];
      param.row_numel = kRowNumel;
      unit.params.push_back(static_cast<std::int32_t>(params.size()));
      params.push_back(param);
    }
    specs.push_back(unit);
  }
  return ShardPlan(std::move(params), std::move(specs), ranks, 200);  // bytes: more than one bucket per unit
}

float value(std::int32_t param, int step, std::int64_t element) {
  return static_cast<float>(param * 64 + step % 50) + static_cast<float>(element % 8) / 8;
}
float gradient(std::int32_t param, int step, std::size_t rank) {
  return static_cast<float>(1 + param + step % 50) + static_cast<float>(rank) * 256;
}

class Rank final : public tt::fsdp::EngineClient {
 public:
  Rank(World& world, int rank, int units, unsigned seed)
      : rank_(static_cast<std::size_t>(rank)),
        plan_(make_plan(static_cast<int>(world.ranks), units)),
        world_(world),
        device_(seed * 101 + static_cast<unsigned>(rank), rank),
        comm_(world, rank, device_),
        seats_(plan_.buckets().size(), nullptr),
        masters_(plan_.buckets().size()),
        gradients_(plan_.buckets().size()),
        written_(plan_.params().size(), false),
        silent_(written_) {
    for (std::size_t b = 0; b < masters_.size(); ++b) {
      masters_[b].resize(static_cast<std::size_t>(plan_.buckets()[b].shard_numel));
      gradients_[b].resize(masters_[b].size());
    }
    Schedule schedule;
    schedule.reshard_after_forward.assign(static_cast<std::size_t>(units), true);
    schedule.reshard_after_forward[0] = false;
    schedule.prefetch = static_cast<std::int32_t>(seed % 3);
    engine_ = std::make_unique<Engine>(plan_, schedule, comm_, device_, *this);
    engine_->allocate();
  }

  // `program`: the same random numbers on all ranks.
  void run(int steps, std::minstd_rand program) {
    std::minstd_rand own(static_cast<unsigned>(rank_) + 17);
    for (int step = 0; step < steps; ++step) {
      set_masters(step);
      std::vector<std::int32_t> order;
      for (std::int32_t unit = 1; unit < static_cast<std::int32_t>(plan_.units().size()); ++unit) {
        if (program() % 8 != 0) {
          order.push_back(unit);
        }
      }
      if (program() % 4 == 0) {
        std::shuffle(order.begin(), order.end(), program);
      }
      forward(order, step);
      const bool reduce = program() % 4 != 0;
      engine_->set_reduce(reduce);
      backward(order, step, own, program);
      if (reduce) {
        check_and_clear(step);
      }
    }
    device_.synchronize();
  }

  void describe() { device_.describe(); }

  void seat(std::int32_t bucket, std::byte* where) override { seats_[static_cast<std::size_t>(bucket)] = where; }
  void unseat(std::int32_t bucket) override { seats_[static_cast<std::size_t>(bucket)] = nullptr; }
  void expose(std::int32_t, bool) override {}
  const std::byte* master_shard(std::int32_t bucket) override {
    return reinterpret_cast<const std::byte*>(masters_[static_cast<std::size_t>(bucket)].data());
  }
  std::byte* gradient_shard(std::int32_t bucket) override {
    return reinterpret_cast<std::byte*>(gradients_[static_cast<std::size_t>(bucket)].data());
  }
  bool has_gradient(std::int32_t param) override { return written_[static_cast<std::size_t>(param)]; }
  bool will_report(std::int32_t param) override { return !silent_[static_cast<std::size_t>(param)]; }
  void gradient_written(std::int32_t param) override { written_[static_cast<std::size_t>(param)] = true; }
  std::byte* allocate(std::size_t bytes) override {
    extra_.emplace_back(bytes);
    return extra_.back().data();
  }
  void backward_began() override {}
  void log(const std::string&) override {}

 private:
  // The optimizer: changes masters on the compute lane.
  void set_masters(int step) {
    device_.submit("optimizer", [this, step] {
      for (std::size_t p = 0; p < plan_.params().size(); ++p) {
        const auto param = static_cast<std::int32_t>(p);
        const auto piece = plan_.piece(param, static_cast<std::int32_t>(rank_));
        auto& master = masters_[static_cast<std::size_t>(plan_.placement(param).bucket)];
        for (std::int64_t i = 0; i < piece.numel; ++i) {
          master[static_cast<std::size_t>(piece.shard_offset + i)] = value(param, step, piece.start + i);
        }
      }
    });
  }

  // A module: reads all parameters of the unit.
  void compute(std::int32_t unit, int step) {
    for (const std::int32_t param : plan_.units()[static_cast<std::size_t>(unit)].params) {
      const auto& placement = plan_.placement(param);
      const std::byte* seat = seats_[static_cast<std::size_t>(placement.bucket)];
      expect(seat != nullptr, plan_.params()[static_cast<std::size_t>(param)].name + " is not gathered");
      const auto* values = reinterpret_cast<const float*>(seat) + placement.offset;
      device_.submit(tt::str("read ", param), [=, this, numel = placement.numel] {
        for (std::int64_t i = 0; i < numel; ++i) {
          expect(values[i] == value(param, step, i),
                 tt::str("parameter ", param, " in step ", step, ", rank ", rank_, ", element ", i, ": ", values[i]));
        }
      });
    }
  }

  void forward(const std::vector<std::int32_t>& order, int step) {
    engine_->begin_forward();
    engine_->before_forward(0);
    for (const std::int32_t unit : order) {
      engine_->before_forward(unit);
      compute(unit, step);
      engine_->after_forward(unit, true);
    }
    compute(0, step);
    engine_->after_forward(0, true);
    engine_->end_forward(true);
  }

  void backward(std::vector<std::int32_t> order, int step, std::minstd_rand& own, std::minstd_rand& program) {
    order.insert(order.begin(), 0);
    for (std::size_t p = 0; p < silent_.size(); ++p) {
      silent_[p] = own() % 6 == 0;
    }
    for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
      // Stamps: the call at position i of the forward consists of operation 2 i and 2 i + 1.
      const auto position = static_cast<std::uint64_t>(order.rend() - unit);
      engine_->before_backward(*unit, 2 * position + 1, *unit == 0 ? 1 : 2 * position);
      compute(*unit, step);
      auto params = plan_.units()[static_cast<std::size_t>(*unit)].params;
      if (program() % 3 == 0) {
        std::shuffle(params.begin(), params.end(), program);
      }
      for (const std::int32_t param : params) {
        if (!silent_[static_cast<std::size_t>(param)]) {
          accumulate(param, step);
        }
      }
    }
    engine_->end_backward();
  }

  void accumulate(std::int32_t param, int step) {
    const GradientDestination to = engine_->gradient_destination(param);
    const auto numel = static_cast<std::size_t>(plan_.placement(param).numel);
    const float g = gradient(param, step, rank_);
    device_.submit(tt::str("gradient of ", param), [=] {
      auto* where = reinterpret_cast<float*>(to.where);
      for (std::size_t i = 0; i < numel; ++i) {
        where[i] = to.add ? where[i] + g : g;
      }
    });
    {
      const std::lock_guard lock(world_.mutex);
      sums()[{param, rank_}] += g;
    }
    engine_->gradient_ready(param);
  }

  // The sum over ranks of what each has accumulated since the last reduction.
  static std::map<std::pair<std::int32_t, std::size_t>, float>& sums() {
    static std::map<std::pair<std::int32_t, std::size_t>, float> all;
    return all;
  }

  void check_and_clear(int step) {
    // end_backward() returned on all ranks only after all had launched, hence accumulated, everything.
    std::map<std::pair<std::int32_t, std::size_t>, float> all;
    {
      const std::lock_guard lock(world_.mutex);
      all = sums();
    }
    std::map<std::int32_t, float> want;
    for (std::size_t r = 0; r < world_.ranks; ++r) {  // added in rank order, as the engine does
      for (std::int32_t p = 0; p < static_cast<std::int32_t>(plan_.params().size()); ++p) {
        if (const auto found = all.find({p, r}); found != all.end()) {
          want[p] += found->second;
        }
      }
    }
    for (std::int32_t p = 0; p < static_cast<std::int32_t>(plan_.params().size()); ++p) {
      const bool has = want.contains(p);
      expect(written_[static_cast<std::size_t>(p)] == has, tt::str("gradient of ", p, " in step ", step));
      if (!has) {
        continue;
      }
      written_[static_cast<std::size_t>(p)] = false;
      const auto piece = plan_.piece(p, static_cast<std::int32_t>(rank_));
      const float mean = want[p] / static_cast<float>(world_.ranks);
      const auto& shard = gradients_[static_cast<std::size_t>(plan_.placement(p).bucket)];
      device_.submit(tt::str("check ", p), [=, &shard] {
        for (std::int64_t i = 0; i < piece.numel; ++i) {
          const float got = shard[static_cast<std::size_t>(piece.shard_offset + i)];
          expect(got == mean, tt::str("gradient of ", p, " in step ", step, ": ", got, " for ", mean));
        }
      });
    }
    checked_.arrive(world_);
    {
      const std::lock_guard lock(world_.mutex);
      for (std::int32_t p = 0; p < static_cast<std::int32_t>(plan_.params().size()); ++p) {
        sums().erase({p, rank_});
      }
    }
    checked_.arrive(world_);
  }

  // Ranks meet, so that the expected sums of one step are read before those of the next are written.
  struct Meeting {
    void arrive(World& world) {
      static std::barrier<> all(static_cast<std::ptrdiff_t>(world.ranks));
      all.arrive_and_wait();
    }
  };

  const std::size_t rank_;
  const ShardPlan plan_;
  World& world_;
  LaneDevice device_;
  LaneCommunicator comm_;
  std::vector<std::byte*> seats_;
  std::vector<std::vector<float>> masters_;
  std::vector<std::vector<float>> gradients_;
  std::vector<bool> written_;
  std::vector<bool> silent_;  // parameters without a gradient in this step, on this rank
  std::deque<std::vector<std::byte>> extra_;
  std::unique_ptr<Engine> engine_;
  Meeting checked_;
};

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  const int ranks = argument(1, 3);
  const int steps = argument(2, 60);
  const auto seed = static_cast<unsigned>(argument(3, 1));
  World world(ranks);
  std::vector<std::unique_ptr<Rank>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<Rank>(world, rank, 6, seed));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        all[static_cast<std::size_t>(rank)]->run(steps, std::minstd_rand(seed));
      } catch (const std::exception& error) {
        expect(false, tt::str("rank ", rank, ": ", error.what()));
      }
    });
  }
  Point done;
  std::thread watch([&] {
    if (!done.await_for(std::chrono::seconds(120))) {
      std::fprintf(stderr, "wrong: the lanes wait for each other\n");
      for (auto& rank : all) {
        rank->describe();
      }
      std::_Exit(1);
    }
  });
  for (auto& thread : threads) {
    thread.join();
  }
  done.reach();
  watch.join();
  std::printf("lanes_stress: %d ranks, %d steps, seed %u: right\n", ranks, steps, seed);
  return 0;
}
