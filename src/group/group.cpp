#include "clowder/group.h"

namespace clowder {

SymmetricMemory::~SymmetricMemory() = default;
Group::~Group() = default;

}  // namespace clowder
