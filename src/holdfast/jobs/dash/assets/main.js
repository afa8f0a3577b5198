// Routes of the page: the list of jobs, a job, and a run. The part after # in the URL names the place.

import { make } from "./dom.js";
import { showJob } from "./job.js";
import { showList } from "./list.js";
import { showRun } from "./run.js";

const main = document.getElementById("main");
let leave = () => {};

/** Show a place: stop the one before, and put the focus on the new heading. */
function show() {
  const hash = location.hash || "#/";
  if (!hash.startsWith("#/")) return; // a link within the page
  const job = /^#\/jobs\/(\d{1,9})$/.exec(hash);
  const run = /^#\/runs\/([0-9a-f]{16})$/.exec(hash);
  leave();
  main.replaceChildren();
  const title = job ? `Job ${job[1]}` : run ? "Run" : "Jobs";
  setTrail(job || run ? [["Jobs", "#/"], [title, hash]] : [[title, "#/"]]);
  document.title = `${title} - Holdfast`;
  leave = job ? showJob(main, Number(job[1])) : run ? showRun(main, run[1]) : showList(main);
  window.scrollTo(0, 0);
}

function setTrail(steps) {
  const items = steps.map(([text, href], index) => {
    const isHere = index === steps.length - 1;
    return make("li", {}, make("a", { href, "aria-current": isHere ? "page" : null }, text));
  });
  document.getElementById("trail").replaceChildren(...items);
}

window.addEventListener("hashchange", () => {
  show();
  if ((location.hash || "#/").startsWith("#/")) main.focus({ preventScroll: true });
});
show();
