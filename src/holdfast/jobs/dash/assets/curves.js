// The curves of a run, drawn by the report's own charts, and a link to its report.

import { make, reconcile, setText } from "./dom.js";
import { Poller } from "./poller.js";
import { showTooltip } from "./tooltip.js";

const EVERY_MS = 5000;
let library = null;

/** Load the chart library once. It is large, so only pages with a curve need it. */
function loadLibrary() {
  library ??= new Promise((resolve, reject) => {
    const script = make("script", { src: "charts.js" });
    script.addEventListener("load", () => resolve(window.vegaEmbed));
    script.addEventListener("error", () => reject(new Error("The chart library could not be loaded.")));
    document.head.append(script);
  });
  return library;
}

export class Curves {
  constructor(path, home) {
    Object.assign(this, { path, poller: null, drawn: new Map(), isStopped: false });
    this.step = make("span", { class: "note" });
    this.note = make("p", { class: "note" });
    this.numbers = make("dl", { class: "numbers" });
    this.figures = make("div", { class: "figures" });
    const title = make("h2", { id: `run-${home.id}`, class: "place" }, home.place);
    const report = make("a", { href: `${path}/report`, target: "_blank", rel: "noopener" }, "Report");
    report.append(make("span", { class: "unseen" }, ` of ${home.place}, in a new tab`));
    this.element = make("section", { "aria-labelledby": `run-${home.id}` },
      make("div", { class: "title" }, title, this.step, report), this.note, this.numbers, this.figures);
    if (home.is_remote) {
      const button = make("button", { type: "button", onclick: () => { button.remove(); this.start(); } }, "Read it from the bucket");
      this.note.before(button);
    } else {
      this.start();
    }
  }

  start() {
    setText(this.note, "Reading the curves...");
    this.poller = new Poller(() => `${this.path}/curves`, EVERY_MS, (value) => this.onValue(value), (error) => setText(this.note, error.message));
  }

  update(home) {
    setText(this.step, home.step === undefined ? "" : `newest checkpoint: step ${home.step}`);
  }

  async onValue(value) {
    setText(this.note, value.figures.length ? value.headline : `${value.headline} It has not recorded a metric yet.`);
    reconcile(this.numbers, value.numbers, (one) => one.name,
      (one) => make("div", {}, make("dt", {}, one.name), make("dd"), make("dd", { class: "remark" })),
      (tile, one) => { setText(tile.children[1], one.value); setText(tile.children[2], one.remark); });
    const wanted = new Set(value.figures.map((one) => one.title));
    for (const [title, chart] of this.drawn) {
      if (!wanted.has(title)) {
        chart.element.remove();
        chart.view?.finalize();
        this.drawn.delete(title);
      }
    }
    for (const figure of value.figures) await this.draw(figure);
  }

  /** Draw a figure beside the present drawing, and then put it in its place: so nothing flickers. */
  async draw(figure) {
    const text = JSON.stringify(figure.spec);
    let chart = this.drawn.get(figure.title);
    if (chart === undefined) {
      // The library gives the elements that it draws in other names and roles.
      const label = `${figure.title}. The report has its numbers as a table.`;
      const place = make("div", { class: "chart", role: "img", "aria-label": label },
        make("p", { class: "note" }, "Drawing..."));
      const element = make("figure", {}, make("figcaption", {}, figure.title), place,
        make("details", {}, make("summary", {}, "About this curve"), make("p", {}, figure.text)));
      chart = { element, place, text: null, view: null };
      this.drawn.set(figure.title, chart);
      this.figures.append(element);
    }
    if (chart.text === text) return;
    chart.text = text;
    setText(chart.element.querySelector("details p"), figure.text);
    const fresh = make("div", { class: "drawing" });
    chart.place.append(fresh);
    try {
      const embed = await loadLibrary();
      const options = { renderer: "svg", actions: false, mode: "vega-lite", ast: true, defaultStyle: false, tooltip: showTooltip };
      const { view } = await embed(fresh, figure.spec, options);
      chart.view?.finalize();
      chart.view = view;
      for (const old of [...chart.place.children]) if (old !== fresh) old.remove();
      fresh.dataset.drawn = "true";
      if (this.isStopped) view.finalize();
    } catch (error) {
      fresh.remove();
      chart.text = null;
      setText(this.note, `The curve could not be drawn: ${error.message}`);
      console.error(error);
    }
  }

  stop() {
    this.isStopped = true;
    this.poller?.stop();
    for (const { view } of this.drawn.values()) view?.finalize();
    showTooltip(null, {}, null, null);
  }
}
