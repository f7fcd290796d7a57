#include "clowder/status.h"

namespace clowder {

std::string to_string(const WaitReport& report) {
  const std::string whom =
      report.waited_for == report.rank ? "its own tasks" : "rank " + std::to_string(report.waited_for);
  return "rank " + std::to_string(report.rank) + " waited for " + whom + " (" + report.condition + ") in " +
         report.pass + " " + report.task;
}

}  // namespace clowder
