// The page of a run whose home was named on the command line.

import { Curves } from "./curves.js";
import { make, setText } from "./dom.js";
import { Poller } from "./poller.js";

/** Show a run, and return a function that ends it. */
export function showRun(main, id) {
  let curves = null;
  const title = make("h1", {}, "Run");
  const place = make("div", { class: "runs" });
  const note = make("p", { class: "note", hidden: true }, "This server does not show the run. It was started without its HOME.");
  main.append(make("div", { class: "title" }, title), note, place);
  const poller = new Poller(() => "api/jobs", 10000, ({ homes }) => {
    const home = homes.find((one) => one.id === id);
    note.hidden = home !== undefined;
    if (home === undefined || curves !== null) return;
    const name = home.place.replace(/\/+$/, "").split("/").at(-1) || home.place;
    setText(title, name);
    document.title = `${name} - Holdfast`;
    curves = new Curves(`api/homes/${id}`, home);
    place.append(curves.element);
  });
  return () => { poller.stop(); curves?.stop(); };
}
