// What the bounds need to know of a problem's routes. A contribution is what one expert adds to one token: rows of the
// same token and expert hold equal values, so they count as one whose weight is their sum. Its energy is that weight
// squared; the shared expert's is 1. Energies are the expected squares of what is added, up to a common factor.
#pragma once

#include <cstdint>
#include <vector>

#include "check/problem.h"

namespace clowder::check {

// A sum of contributions, each made of `values` independent ones.
class Energy {
 public:
  void add(double energy, double values) {
    total_ += energy;
    spread_ += energy * energy / values;
  }
  double total() const { return total_; }
  // How many equal values would average as these do.
  double count() const { return spread_ > 0.0 ? total_ * total_ / spread_ : 0.0; }

 private:
  double total_ = 0.0;
  double spread_ = 0.0;
};

struct ExpertStatistics {
  Energy rows;            // with one value a row
  double unmerged = 0.0;  // sum of squared weights of single rows
};

struct RouteStatistics {
  double routes = 0.0;              // slots with a route, equal ones of a token counted once
  double fewest_routes = 0.0;       // of a token that has any
  Energy routed;                    // all routed contributions, one value each
  double shared = 0.0;              // energy of the shared expert's contributions
  double unmerged = 0.0;            // sum of squared weights of single rows
  double exact_products = 0.0;      // the part of it whose weight is a power of two
  double copied_out = 0.0;          // energy of tokens whose out is the y of one slot
  double copied_dx = 0.0;           // and whose dx is that of one slot
  double paired_dx = 0.0;           // energy of tokens whose dx is the sum of two slots, as far as those are alike
  Energy tokens;                    // one value a token
  Energy hidden;                    // of tokens: I or Is values a contribution
  double fewest_hidden = 0.0;       // hidden values of the token that has the fewest
  double largest_token = 0.0;       // its energy over the mean of tokens that have any
  double worst_cancellation = 1.0;  // of a token: its rows' squared weights over its contributions' energies
  std::vector<ExpertStatistics> experts;
};

RouteStatistics collect_statistics(const Problem& problem);

}  // namespace clowder::check
