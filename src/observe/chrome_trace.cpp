// Timelines in Chrome's trace format.
#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <ostream>
#include <utility>

#include "observe/timeline.h"

namespace clowder {
namespace {

// One row of the picture: what one worker did in one role for one rank.
struct Track {
  WorkerKind kind;
  int index;
  Role role;

  int thread_id() const { return (index * 2 + (kind == WorkerKind::kMathWorker ? 1 : 0)) * kNumRoles + sort() + 1; }
  int sort() const { return static_cast<int>(role); }
  std::string name() const {
    const char* worker = kind == WorkerKind::kMathWorker ? "math worker " : "copy agent ";
    return worker + std::to_string(index) + ": " + to_string(role);
  }
};

std::string event_name(const TimelineEvent& event) {
  if (event.role == Role::kWait) return std::string("wait for ") + to_string(event.cause);
  return plan::to_string(event.task);
}

// Events and metadata, with commas between them.
class Writer {
 public:
  Writer(std::ostream& out, std::int64_t origin_ns) : out_(out), origin_ns_(origin_ns) {}

  void event(const TimelinePass& pass, const Track& track, const TimelineEvent& event) {
    begin();
    char times[96];
    std::snprintf(times, sizeof times, R"("ts":%.3f,"dur":%.3f)", microseconds(event.begin_ns - origin_ns_),
                  microseconds(event.end_ns - event.begin_ns));
    out_ << R"({"ph":"X","name":")" << event_name(event) << R"(","cat":")" << to_string(event.role) << R"(","pid":)"
         << event.rank << R"(,"tid":)" << track.thread_id() << ',' << times << R"(,"args":{"pass":")"
         << plan::to_string(pass.pass) << R"(","task":")" << plan::to_string(event.task) << R"(","block":)"
         << event.block << R"(,"tile":)" << event.tile << "}}";
  }

  void name(const char* what, int process, int thread, const std::string& name, int sort_index) {
    const auto head = [&](const std::string& kind) {
      begin();
      out_ << R"({"ph":"M","name":")" << what << kind << R"(","pid":)" << process << R"(,"tid":)" << thread;
    };
    head("_name");
    out_ << R"(,"args":{"name":")" << name << R"("}})";
    head("_sort_index");
    out_ << R"(,"args":{"sort_index":)" << sort_index << "}}";
  }

 private:
  static double microseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; }
  void begin() {
    out_ << (is_first_ ? "\n" : ",\n");
    is_first_ = false;
  }

  std::ostream& out_;
  std::int64_t origin_ns_;
  bool is_first_ = true;
};

std::int64_t first_time(const Timeline& timeline) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const TimelinePass& pass : timeline.passes()) {
    first = std::min(first, pass.begin_ns);
    for (const auto& lane : pass.lanes) {
      if (lane->begin() != lane->end()) first = std::min(first, lane->begin()->begin_ns);
    }
  }
  return first;
}

}  // namespace

void write_chrome_trace(const Timeline& timeline, std::ostream& out) {
  out << R"({"displayTimeUnit":"ms","traceEvents":[)";
  Writer writer(out, first_time(timeline));
  std::map<std::pair<int, int>, Track> tracks;  // by rank and thread
  for (const TimelinePass& pass : timeline.passes()) {
    for (const auto& lane : pass.lanes) {
      for (const TimelineEvent& event : *lane) {
        const Track track{lane->kind(), lane->index(), event.role};
        tracks.insert({{event.rank, track.thread_id()}, track});
        writer.event(pass, track, event);
      }
    }
  }
  int last_rank = -1;
  for (const auto& [where, track] : tracks) {
    const auto [rank, thread] = where;
    if (rank != last_rank) writer.name("process", rank, 0, "rank " + std::to_string(rank), rank);
    last_rank = rank;
    writer.name("thread", rank, thread, track.name(), thread);
  }
  out << "\n]}\n";
}

}  // namespace clowder
