"use strict";
// Draws every chart into its place. The page's state is told on <body>, for whoever waits for it.
(async () => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  let failed = 0;
  for (const [id, spec] of Object.entries(specs)) {
    const place = document.getElementById("chart-" + id);
    try {
      await vegaEmbed(place, spec, { renderer: "svg", actions: false, mode: "vega-lite", tooltip: { theme: "page" } });
    } catch (error) {
      failed += 1;
      place.textContent = "This chart could not be drawn: " + error + ". The table below holds its numbers.";
      console.error(id, error);
    }
  }
  document.body.dataset.drawn = String(Object.keys(specs).length - failed);
  document.body.dataset.failed = String(failed);
})();
