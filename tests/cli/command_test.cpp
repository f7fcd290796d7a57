// The command as scripts use it: exit codes, and JSON on standard output.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

namespace clowder {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int code = -1;
  std::string out;
  std::string errors;
};

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Command : public testing::Test {
 protected:
  void SetUp() override {
    // Programs of one build stand in one folder.
    program_ = fs::read_symlink("/proc/self/exe").parent_path() / "clowder";
    if (!fs::exists(program_)) GTEST_SKIP() << "this build has no command (CLOWDER_BUILD_CLI=OFF)";
  }

  Outcome run(const std::string& arguments) const {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    const fs::path errors = fs::path(testing::TempDir()) / ("clowder_" + name + ".txt");
    std::string line = program_.string();
    line.append(" ").append(arguments).append(" 2>").append(errors.string());
    FILE* pipe = popen(line.c_str(), "r");
    Outcome outcome;
    std::array<char, 4096> buffer;
    for (std::size_t count; (count = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
      outcome.out.append(buffer.data(), count);
    }
    const int status = pclose(pipe);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    outcome.errors = read_file(errors);
    fs::remove(errors);
    return outcome;
  }

  // One object and nothing else; errors are one line.
  nlohmann::json run_json(const std::string& arguments, int code) const {
    const Outcome outcome = run(arguments + " --json");
    EXPECT_EQ(outcome.code, code) << arguments << "\n" << outcome.out << outcome.errors;
    EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 1) << outcome.out;
    if (code != 0 && code != 1) {
      EXPECT_EQ(std::count(outcome.errors.begin(), outcome.errors.end(), '\n'), 1) << outcome.errors;
    }
    return nlohmann::json::parse(outcome.out);
  }

  void expect_error(const std::string& arguments, int code, const std::string& name, const std::string& words) const {
    const nlohmann::json json = run_json(arguments, code);
    EXPECT_FALSE(json["ok"].get<bool>());
    EXPECT_EQ(json["error"]["code"], name);
    EXPECT_NE(json["error"]["message"].get<std::string>().find(words), std::string::npos) << json;
    const Outcome plain = run(arguments);
    EXPECT_EQ(plain.code, code);
    EXPECT_NE(plain.errors.find(words), std::string::npos) << plain.errors;
  }

 private:
  fs::path program_;
};

constexpr const char* kSmall = "check --tokens 40 --hidden 64 --intermediate 32 --timeout 20 ";

TEST_F(Command, InfoTellsVersionEnginesAndMachine) {
  const nlohmann::json json = run_json("info", 0);
  EXPECT_FALSE(json["version"].get<std::string>().empty());
  EXPECT_TRUE(json["engines"]["cpu"]["usable"].get<bool>());
  EXPECT_FALSE(json["cpu"]["instruction_set"].get<std::string>().empty());
  EXPECT_GE(json["cpu"]["cores"].get<int>(), 1);
  EXPECT_TRUE(json.contains("gpu"));
  EXPECT_NE(run("info").out.find("clowder"), std::string::npos);
}

TEST_F(Command, CheckPassesAndSaysSo) {
  EXPECT_TRUE(run_json(kSmall, 0)["ok"].get<bool>());
  const Outcome text = run(kSmall);
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.out.find("dtopk_weights"), std::string::npos);
  EXPECT_EQ(text.errors, "") << "progress belongs to terminals only";
}

TEST_F(Command, EveryOptionIsTaken) {
  const nlohmann::json json = run_json(
      "check --engine cpu --ranks 4 --tokens 17,16,7,1 --hidden 64 --intermediate 32 --shared-intermediate 32 "
      "--experts 16 --topk 3 --activation swiglu-clamp:7 --routing zipf:1.1 --drop 0.1 --bad-ids 2 "
      "--topk-weights signed --scale 2 --ring-rows 1/8 --saved-rows 1/3 --chunk-rows 32 --blocks 2 --keep-x "
      "--wgrad accumulate-bf16 --poison --jitter --repeat 2 --seed 5 --timeout 30",
      0);
  EXPECT_EQ(json["skipped_ids"], 2);
  EXPECT_EQ(json["tensors"].size(), 7u);
  EXPECT_EQ(run_json(std::string(kSmall) + "--forward-only", 0)["tensors"].size(), 1u);
  for (const char* name : {"swiglu", "geglu", "reglu", "gpt-oss"}) {
    EXPECT_TRUE(run_json(std::string(kSmall) + "--activation " + name, 0)["ok"].get<bool>()) << name;
  }
}

TEST_F(Command, BadArgumentsAreCodeTwo) {
  const std::string small = kSmall;
  expect_error(small + "--hidden 100", 2, "argument", "hidden: 100");
  expect_error(small + "--ranks 3", 2, "argument", "num_experts");
  expect_error(small + "--tokens 1,2", 2, "argument", "tokens");
  expect_error(small + "--tokens x", 2, "argument", "tokens");
  expect_error(small + "--routing nowhere", 2, "argument", "routing");
  expect_error(small + "--activation gelu", 2, "argument", "activation");
  expect_error(small + "--engine tpu", 2, "argument", "engine");
  expect_error(small + "--repeat 0", 2, "argument", "repeat");
  expect_error(small + "--ring-rows 1", 2, "argument", "must be at least");
  expect_error(small + "--no-such-option", 2, "argument", "no-such-option");
  expect_error("nothing", 2, "argument", "");
  EXPECT_EQ(run("").code, 2);
  EXPECT_EQ(run("--help").code, 0);
}

TEST_F(Command, MissingEnginesAreCodeThree) {
  expect_error(std::string(kSmall) + "--engine sm90", 3, "unsupported", "sm90");
}

TEST_F(Command, LostRanksAreCodeFour) {
  const nlohmann::json json =
      run_json("check --tokens 40 --hidden 64 --intermediate 32 --ranks 4 --timeout 0.5 --lose-rank 2:forward", 4);
  EXPECT_EQ(json["error"]["code"], "timeout");
  ASSERT_EQ(json["ranks"].size(), 3u);
  for (const auto& rank : json["ranks"]) {
    EXPECT_NE(rank["rank"], 2);
    EXPECT_NE(rank["error"].get<std::string>().find("rank 2"), std::string::npos) << rank;
  }
}

TEST_F(Command, TraceWritesAFileThatPerfettoOpens) {
  const fs::path file = fs::path(testing::TempDir()) / "clowder_trace.json";
  for (const char* pass : {"forward", "backward", "forward+backward"}) {
    const nlohmann::json summary = run_json(
        "trace --tokens 40 --hidden 64 --intermediate 32 --ranks 2 --jitter --out " + file.string() + " --pass " + pass,
        0);
    std::set<std::string> passes;
    for (const auto& each : summary["passes"]) passes.insert(each["pass"]);
    const bool forward = std::string(pass) != "backward";
    EXPECT_EQ(passes.contains("forward"), forward);
    EXPECT_EQ(passes.contains("schedule"), forward);
    EXPECT_EQ(passes.contains("backward"), std::string(pass) != "forward");
    EXPECT_GT(summary["ms"].get<double>(), 0.0);
    EXPECT_GE(summary["exposed_ms"].get<double>(), 0.0);
    EXPECT_LE(summary["exposed_percent"].get<double>(), 100.0);

    const nlohmann::json trace = nlohmann::json::parse(read_file(file));
    std::set<std::pair<int, int>> named, used;
    std::set<int> named_processes;
    std::set<std::string> roles;
    std::int64_t events = 0;
    for (const auto& event : trace["traceEvents"]) {
      const std::pair<int, int> thread = {event["pid"].get<int>(), event["tid"].get<int>()};
      ASSERT_FALSE(event["name"].get<std::string>().empty());
      if (event["ph"] == "M") {
        if (event["name"] == "thread_name") named.insert(thread);
        if (event["name"] == "process_name") named_processes.insert(thread.first);
        continue;
      }
      ASSERT_EQ(event["ph"], "X");
      EXPECT_GE(event["ts"].get<double>(), 0.0);
      EXPECT_GE(event["dur"].get<double>(), 0.0);
      roles.insert(event["cat"]);
      used.insert(thread);
      ++events;
    }
    EXPECT_EQ(named, used);
    EXPECT_EQ(named_processes, (std::set<int>{0, 1}));
    EXPECT_EQ(roles, (std::set<std::string>{"copy", "wait", "math", "epilogue", "reduce"}));
    EXPECT_EQ(summary["events"], events);
  }
  fs::remove(file);
  expect_error("trace --out /no/such/folder/file", 2, "argument", "out: ");
  expect_error("trace --out " + file.string() + " --pass schedule", 2, "argument", "pass: ");
  expect_error("trace --tokens 40", 2, "argument", "--out");
  expect_error("trace --engine sm90 --out " + file.string(), 3, "unsupported", "sm90");
}

TEST_F(Command, BenchPrintsRows) {
  const std::string small = "bench --tokens 40 --hidden 64 --intermediate 32 --repeats 2 --block-ms 1 ";
  const nlohmann::json json =
      run_json(small + "--pass schedule --pass forward --pass backward --pass forward+backward", 0);
  ASSERT_EQ(json["rows"].size(), 4u);
  for (const auto& row : json["rows"]) {
    EXPECT_GT(row["clowder_ms"].get<double>(), 0.0);
    EXPECT_EQ(row["engine"], "cpu");
    EXPECT_EQ(row["H"], 64);
  }
  EXPECT_NE(run(small).out.find("TFLOP/s"), std::string::npos);
  expect_error(small + "--case nothing", 2, "argument", "case");
  expect_error("bench --case nothing", 2, "argument", "must be one of dsv3-ep8");
  expect_error("bench --case olmoe-7b --scale-tokens 2", 2, "argument", "scale-tokens");
  expect_error(small + "--pass sideways", 2, "argument", "pass");
  expect_error(small + "--repeats 0", 2, "argument", "repeats");
  expect_error(small + "--emulate-peers 8 --link-gbs 450", 3, "unsupported", "emulate-peers");
  expect_error(small + "--engine sm90", 3, "unsupported", "sm90");
}

// Its weights and their gradients take 1.2 GB.
TEST_F(Command, LongBenchRunsACase) {
  const nlohmann::json json =
      run_json("bench --case qwen3-235b-ep8 --scale-tokens 0.0001 --repeats 1 --block-ms 1 --pass forward", 0);
  EXPECT_EQ(json["rows"][0]["case"], "qwen3-235b-ep8");
  EXPECT_EQ(json["rows"][0]["T"], 2);
  EXPECT_EQ(json["rows"][0]["E"], 16);
  EXPECT_EQ(json["rows"][0]["scale_tokens"], 0.0001);
}

}  // namespace
}  // namespace clowder
