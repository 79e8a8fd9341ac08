// That the pieces of down are all of it, once, and in an order in which a run finds the one before begun.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "moe/pieces.h"

namespace check {

// `expect(good, what)` takes the verdicts, one for each division.
template <class Expect> void check_pieces(const Expect& expect) {
  for (int panels = 1; panels <= 70; ++panels)
    for (int workers : {1, 2, 3, 5, 14, 16})
      for (int each : {1, 2, 8})
        for (bool pairs : {false, true}) {
          const lk::Pieces pieces(panels, workers, each, pairs);
          std::vector<int> runs(size_t(panels), 0), all(size_t(panels), 0);
          bool good = true;
          for (int i = 0; i < std::max(pieces.count(), workers) && good; ++i) {
            const lk::Piece piece = pieces.at(i);
            if (piece.begin == piece.end) continue;
            good = i < pieces.count() && 0 <= piece.begin && piece.begin < piece.end && piece.end <= panels && (!pairs || piece.begin % 2 == 0) && piece.run < piece.runs;
            for (int p = piece.begin; p < piece.end && good; ++p) {
              good = runs[size_t(p)]++ == piece.run;
              all[size_t(p)] = piece.runs;
            }
          }
          expect(good && runs == all, std::to_string(panels) + " panels among " + std::to_string(workers) + " workers are not each taken once in order");
        }
}

}  // namespace check
