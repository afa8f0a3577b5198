// Tooltip of the charts. The library's own one needs styles inside of elements, which the page's policy forbids.

import { make } from "./dom.js";

const GAP_PX = 12;
let box = null;

/** Show the values of a mark beside the pointer, or hide the tooltip if there are none. */
export function showTooltip(_handler, event, _item, value) {
  box?.remove();
  box = null;
  if (value === null || value === undefined || value === "") return;
  const rows = typeof value === "object" ? Object.entries(value) : [["", value]];
  const cells = rows.map(([name, text]) => make("tr", {}, make("th", {}, name), make("td", {}, String(text))));
  box = make("div", { class: "tooltip", "aria-hidden": "true" }, make("table", {}, ...cells));
  document.body.append(box);
  const left = Math.min(event.clientX + GAP_PX, window.innerWidth - box.offsetWidth - GAP_PX);
  const top = Math.min(event.clientY + GAP_PX, window.innerHeight - box.offsetHeight - GAP_PX);
  box.style.left = `${Math.max(0, left)}px`;
  box.style.top = `${Math.max(0, top)}px`;
}
