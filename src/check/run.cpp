#include "check/run.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <latch>
#include <memory>
#include <thread>

#include "check/engine_step.h"
#include "check/random.h"
#include "model/reference.h"

namespace clowder::check {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void reject(const std::string& message) { throw Error(ErrorCode::kArgument, message); }

bool parse_count(const std::string& text, std::int64_t& count) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, count);
  return error == std::errc{} && stopped == end && count >= 0;
}

// "N" or "A/B".
bool parse_rows(const std::string& text, RowCount& rows) {
  const std::size_t slash = text.find('/');
  rows.kind = slash == std::string::npos ? RowCount::Kind::kRows : RowCount::Kind::kFraction;
  if (!parse_count(text.substr(0, slash), rows.numerator)) return false;
  return slash == std::string::npos || (parse_count(text.substr(slash + 1), rows.denominator) && rows.denominator > 0);
}

// Rows of every rank.
std::vector<std::int64_t> received_rows(const Problem& problem) {
  const std::int32_t local_experts = problem.shape.num_experts / problem.spec.num_ranks();
  std::vector<std::int64_t> rows(problem.spec.tokens_per_rank.size());
  for (std::size_t slot = 0; slot < problem.topk_idx.size(); ++slot) {
    if (problem.has_route(static_cast<std::int64_t>(slot))) ++rows[problem.topk_idx[slot] / local_experts];
  }
  return rows;
}

std::int64_t count_skipped_ids(const Problem& problem) {
  return std::count_if(problem.topk_idx.begin(), problem.topk_idx.end(),
                       [&](std::int32_t id) { return id != -1 && (id < 0 || id >= problem.shape.num_experts); });
}

std::int64_t part_of(std::int64_t rows, const RowCount& count) {
  return (rows * count.numerator + count.denominator - 1) / count.denominator;
}

std::int64_t resolve_ring(const Problem& problem, const RowCount& count, EngineKind engine) {
  const std::vector<std::int64_t> received = received_rows(problem);
  const std::int64_t most = *std::max_element(received.begin(), received.end());
  const std::int64_t least = Workspace::min_ring_rows(engine);
  switch (count.kind) {
    case RowCount::Kind::kDefault:
      return WorkspaceOptions::kDefault;
    case RowCount::Kind::kMinimum:
      return least;
    case RowCount::Kind::kFraction:
      return std::max(least, part_of(most, count));
    case RowCount::Kind::kEverything:
      // Every expert's last row block may be padded; a block is smaller than the least ring.
      return most + (problem.shape.num_experts / problem.spec.num_ranks() + 1) * least;
    case RowCount::Kind::kRows:
      break;
  }
  if (count.numerator >= least) return count.numerator;
  reject("ring-rows: " + std::to_string(count.numerator) + ", must be at least " + std::to_string(least) +
         ", the minimum of this engine");
}

std::int64_t resolve_saved(const Problem& problem, const RowCount& count) {
  const std::vector<std::int64_t> received = received_rows(problem);
  const std::int64_t most = *std::max_element(received.begin(), received.end());
  switch (count.kind) {
    case RowCount::Kind::kRows:
      return count.numerator;
    case RowCount::Kind::kFraction:
      return part_of(most, count);
    case RowCount::Kind::kEverything:
      return most;
    case RowCount::Kind::kMinimum:
    case RowCount::Kind::kDefault:
      break;
  }
  return WorkspaceOptions::kDefault;
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs the repeats and fills in everything of `report` but the tensors, which it returns.
LayerTensors run_engine(const Problem& problem, const RunOptions& options, Report& report) {
  LayerTensors tensors;
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<EngineStep> step;
  std::string first_digest;
  for (int repeat = 0; repeat < options.repeat; ++repeat) {
    // Each repeat with delays draws others.
    if (!workspace || options.jitter) {
      step.reset();
      workspace.reset();
      workspace = std::make_unique<Workspace>(problem.shape, make_virtual_group(problem.spec.num_ranks()),
                                              make_workspace_options(problem, options, repeat));
      step = std::make_unique<EngineStep>(problem, *workspace, options.workspace.keep_x, options.workspace.engine);
    }
    step->reset();
    const Clock::time_point start = Clock::now();
    step->run(*workspace);
    report.seconds += seconds_since(start) / options.repeat;
    report.skipped_ids = summarise(problem.shape, problem.spec.num_ranks(), step->finished_schedule(0)).skipped_ids;
    if (repeat == 0) {
      tensors = step->collect();
      first_digest = step->digest_of_everything();
    } else if (step->digest_of_everything() != first_digest) {
      report.repeats_identical = false;
    }
  }
  return tensors;
}

// One rank's calls up to the phase in which it is lost, or all of them.
void run_rank(const Problem& problem, Workspace& workspace, EngineStep& step, int rank, std::optional<Phase> lost_in) {
  if (lost_in == Phase::kSchedule) return;
  workspace.build_schedule({step.ids(rank)}, {step.schedule(rank)});
  if (lost_in == Phase::kForward) return;
  workspace.forward({step.forward_inputs(rank)});
  if (lost_in == Phase::kBackward || problem.spec.forward_only) return;
  workspace.backward({step.backward_inputs(rank)}, problem.spec.gradient_mode);
}

}  // namespace

RowCount parse_ring_rows(const std::string& text) {
  RowCount rows;
  if (text == "min") {
    rows.kind = RowCount::Kind::kMinimum;
  } else if (text == "full") {
    rows.kind = RowCount::Kind::kEverything;
  } else if (!parse_rows(text, rows)) {
    reject("ring-rows: \"" + text + "\", must be a number of rows, min, a fraction such as 1/8, or full");
  }
  return rows;
}

RowCount parse_saved_rows(const std::string& text) {
  RowCount rows;
  if (text == "all") {
    rows.kind = RowCount::Kind::kEverything;
  } else if (!parse_rows(text, rows)) {
    reject("saved-rows: \"" + text + "\", must be a number of rows, a fraction such as 1/3, or all");
  }
  return rows;
}

LostRank parse_lost_rank(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string phase = colon == std::string::npos ? "forward" : text.substr(colon + 1);
  LostRank lost;
  std::int64_t rank = 0;
  const bool is_rank = parse_count(text.substr(0, colon), rank) && rank < 65536;
  if (is_rank && (phase == "schedule" || phase == "forward" || phase == "backward")) {
    lost.rank = static_cast<int>(rank);
    lost.phase = phase == "schedule" ? Phase::kSchedule : phase == "forward" ? Phase::kForward : Phase::kBackward;
    return lost;
  }
  reject("lose-rank: \"" + text + "\", must be a rank, or a rank and schedule, forward or backward, as in 1:backward");
}

WorkspaceOptions make_workspace_options(const Problem& problem, const RunOptions& options, int repeat) {
  WorkspaceOptions result = options.workspace;
  result.ring_rows = resolve_ring(problem, options.ring_rows, options.workspace.engine);
  result.saved_rows = resolve_saved(problem, options.saved_rows);
  if (options.jitter) result.jitter_seed = mix_bits(problem.spec.seed * 1024 + static_cast<std::uint64_t>(repeat)) | 1u;
  return result;
}

Report run_check(const ProblemSpec& spec, const RunOptions& options) {
  if (options.repeat < 1) reject("repeat: " + std::to_string(options.repeat) + ", must be 1 or more");
  options.progress("data");
  const Problem problem = make_problem(spec, options.threads);
  Report report;
  report.engine = to_string(options.workspace.engine);
  report.expected_skipped_ids = count_skipped_ids(problem);
  options.progress("engine");
  const LayerTensors tensors = run_engine(problem, options, report);
  options.progress("reference");
  ReferenceResults reference = compute_reference(problem, options.threads);
  options.progress("comparison");
  report.tensors = judge(problem, tensors, reference);
  return report;
}

std::vector<RankOutcome> run_with_lost_rank(const ProblemSpec& spec, const RunOptions& options, const LostRank& lost) {
  const int ranks = spec.num_ranks();
  if (ranks < 2) reject("lose-rank: needs at least 2 ranks; give --ranks");
  if (lost.rank >= ranks) {
    reject("lose-rank: " + std::to_string(lost.rank) + ", must be a rank from 0 to " + std::to_string(ranks - 1));
  }
  if (lost.phase == Phase::kBackward && spec.forward_only) reject("lose-rank: backward does not run with forward-only");
  options.progress("data");
  const Problem problem = make_problem(spec, options.threads);
  const WorkspaceOptions workspace_options = make_workspace_options(problem, options, 0);
  // Arguments that no rank can use are refused before one waits for another.
  const Workspace usable(problem.shape, make_virtual_group(ranks), workspace_options);
  const auto groups = make_threaded_groups(ranks, options.workspace.timeout_s);
  std::vector<RankOutcome> outcomes(static_cast<std::size_t>(ranks));
  // As processes would: no workspace goes while another rank may still call.
  std::latch all_called(ranks);

  const auto drive = [&](int rank) {
    RankOutcome& outcome = outcomes[rank];
    outcome.rank = rank;
    std::unique_ptr<Workspace> workspace;
    std::unique_ptr<EngineStep> step;
    try {
      workspace = std::make_unique<Workspace>(problem.shape, groups[rank], workspace_options);
      step = std::make_unique<EngineStep>(problem, *workspace, options.workspace.keep_x);
      step->reset();
      run_rank(problem, *workspace, *step, rank, rank == lost.rank ? std::optional(lost.phase) : std::nullopt);
    } catch (const Error& error) {
      outcome.timed_out = error.code() == ErrorCode::kTimeout;
      outcome.error = error.what();
    } catch (const std::exception& error) {
      outcome.error = error.what();
    }
    all_called.arrive_and_wait();
  };
  options.progress("engine");
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(drive, rank);
  threads.clear();  // joins
  outcomes.erase(outcomes.begin() + lost.rank);
  return outcomes;
}

}  // namespace clowder::check
