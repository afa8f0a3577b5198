// The output of a job: the newest lines, and new ones as they are written. Old lines leave the page.

import { make, setAttribute, setText } from "./dom.js";
import { bytes, clock, plural } from "./format.js";
import { Poller } from "./poller.js";

const EVERY_MS = 1000;
const MAX_LINES = 5000;
const NEAR_END_PX = 40;

export class Output {
  constructor(place, job) {
    this.job = job;
    this.cursor = "";
    this.lines = make("div", { class: "lines", role: "log", "aria-live": "off", "aria-label": "Output", tabindex: "0", onscroll: () => this.onScroll() });
    this.progress = make("div", { class: "progress" });
    this.follow = make("input", { type: "checkbox", id: "follow", checked: true, onchange: () => this.toEnd() });
    this.times = make("input", { type: "checkbox", id: "times", onchange: () => this.showTimes() });
    this.note = make("span", { class: "note" });
    this.node = make("select", { id: "node", onchange: () => this.restart() }, make("option", { value: "" }, "all nodes"));
    for (let rank = 0; rank < job.num_nodes; rank += 1) this.node.append(make("option", { value: rank }, `node ${rank}`));
    const controls = make("div", { class: "controls" },
      make("label", {}, this.follow, " Follow"), make("label", {}, this.times, " Times"));
    if (job.num_nodes > 1) controls.append(make("label", {}, "Show ", this.node));
    controls.append(this.note);
    this.lines.append(this.progress);
    place.append(controls, this.lines);
    this.resizing = new ResizeObserver(() => this.toEnd()); // a narrower page has more lines
    this.resizing.observe(this.lines);
    this.poller = new Poller(() => this.path(), EVERY_MS, (value) => this.onValue(value), (error) => setText(this.note, error.message));
  }

  path() {
    const query = new URLSearchParams({ after: this.cursor, node: this.node.value });
    return `api/jobs/${this.job.id}/output?${query}`;
  }

  restart() {
    this.cursor = "";
    this.lines.replaceChildren(this.progress);
    this.progress.replaceChildren();
    if (this.poller.isStopped) {
      this.poller = new Poller(() => this.path(), EVERY_MS, (value) => this.onValue(value), (error) => setText(this.note, error.message));
    } else {
      this.poller.restart();
    }
  }

  onValue(value) {
    const isFirst = this.cursor === "";
    const fragment = document.createDocumentFragment();
    if (value.skipped_bytes || value.skipped_lines) fragment.append(this.gap(value, isFirst));
    for (const line of value.lines) fragment.append(this.line(line));
    this.lines.insertBefore(fragment, this.progress);
    while (this.lines.childElementCount > MAX_LINES + 1) this.lines.firstElementChild.remove();
    this.progress.replaceChildren(...value.progress.map((line) => this.line(line)));
    const hasMore = value.cursor !== this.cursor;
    this.cursor = value.cursor;
    setText(this.note, value.is_end && this.lines.childElementCount === 1 ? "There is no output." : "");
    setAttribute(this.lines, "data-complete", value.is_end);
    if (this.follow.checked && (hasMore || value.progress.length)) this.toEnd();
    if (value.is_end && !hasMore) this.poller.stop(); // nothing follows
    else if (value.is_end) this.poller.soon();
  }

  line({ node, unix_s: unixS, text }) {
    const parts = [];
    if (unixS) parts.push(make("time", {}, clock(unixS)));
    if (this.job.num_nodes > 1) parts.push(make("span", { class: "node", "data-node": node % 6 }, `node ${node}`));
    return make("div", { class: "line" }, ...parts, make("span", { class: "text" }, text));
  }

  gap(value, isFirst) {
    const what = value.skipped_bytes ? bytes(value.skipped_bytes) : plural(value.skipped_lines, "line");
    const text = isFirst ? `${what} before this: holdfast logs ${this.job.id}` : `${what} left out here, as they came too fast: holdfast logs ${this.job.id}`;
    return make("div", { class: "line gap" }, text);
  }

  onScroll() {
    const isNearEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < NEAR_END_PX;
    if (this.follow.checked !== isNearEnd) this.follow.checked = isNearEnd;
  }

  showTimes() {
    setAttribute(this.lines, "data-times", this.times.checked);
    this.toEnd();
  }

  toEnd() {
    if (this.follow.checked) this.lines.scrollTop = this.lines.scrollHeight;
  }

  stop() {
    this.resizing.disconnect();
    this.poller.stop();
  }
}
