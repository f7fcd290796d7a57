#include "plan/task.h"

namespace clowder::plan {

const char* to_string(Pass pass) {
  switch (pass) {
    case Pass::kSchedule:
      return "schedule";
    case Pass::kForward:
      return "forward";
    case Pass::kBackward:
      return "backward";
  }
  return "unknown pass";
}

const char* to_string(TaskKind kind) {
  switch (kind) {
    case TaskKind::kStageIds:
      return "publishing expert ids";
    case TaskKind::kBuildSchedule:
      return "building the schedule";
    case TaskKind::kStageInputs:
      return "publishing inputs";
    case TaskKind::kPull:
      return "dispatch";
    case TaskKind::kPublishDone:
      return "publishing done";
    case TaskKind::kFinish:
      return "finish";
    case TaskKind::kSharedUp:
      return "shared gate/up";
    case TaskKind::kUp:
      return "gate/up";
    case TaskKind::kDown:
      return "down and combine";
    case TaskKind::kOut:
      return "output sum";
    case TaskKind::kRecompute:
      return "recompute";
    case TaskKind::kHidden:
      return "hidden gradient";
    case TaskKind::kInput:
      return "input gradient and combine";
    case TaskKind::kWeight:
      return "weight gradient";
    case TaskKind::kSharedHidden:
      return "shared hidden gradient";
    case TaskKind::kSharedWeight:
      return "shared weight gradient";
    case TaskKind::kInputSum:
      return "input gradient sum";
  }
  return "unknown task";
}

const char* to_string(FlagKind kind) {
  switch (kind) {
    case FlagKind::kIdsReady:
      return "ids_ready";
    case FlagKind::kInputsReady:
      return "inputs_ready";
    case FlagKind::kDone:
      return "done";
  }
  return "unknown flag";
}

}  // namespace clowder::plan
