"use strict";
// Draws every chart. The state of the page is in data attributes of <body>, for tests.
(async () => {
  if (innerWidth < 640) for (const about of document.querySelectorAll(".about")) about.open = false;
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
