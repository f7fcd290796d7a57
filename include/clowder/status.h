// What a workspace reports of its ranks.
#pragma once

#include <string>

#include "clowder/export.h"

namespace clowder {

// Where a wait ran out of time. An engine keeps one for each rank of the launch that has something to tell.
struct WaitReport {
  int rank = -1;          // who waited
  int waited_for = -1;    // the rank that did not arrive; the rank itself when it waited for its own tasks
  std::string pass;       // "schedule", "forward" or "backward"
  std::string task;       // what the waiting task was to do, "dispatch" for example
  std::string condition;  // the flag or counter that it waited for
};

// One sentence: "rank 0 waited for rank 2 (inputs_ready) in forward dispatch".
CLOWDER_API std::string to_string(const WaitReport& report);

}  // namespace clowder
