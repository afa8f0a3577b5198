// Elements of the page. Texts come from strangers' files, so they are only ever set as text.

/** Return an element. Attributes that are false or null are left out; children are elements or texts. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick" || name === "oninput" || name === "onchange" || name === "onscroll") {
      element.addEventListener(name.slice(2), value);
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set the text of an element if it differs, so that nothing flickers and selections stay. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Set or remove an attribute if it differs. */
export function setAttribute(element, name, value) {
  if (value === null || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, String(value));
  }
}

/** Make the children of an element those of the items, in their order. Existing ones are kept and updated. */
export function reconcile(parent, items, keyOf, create, update) {
  const known = parent.__children ?? new Map();
  const next = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const child = known.get(key) ?? create(item);
    next.set(key, child);
    update(child, item);
    if (child === place) {
      place = place.nextElementSibling;
    } else {
      parent.insertBefore(child, place);
    }
  }
  for (const [key, child] of known) if (!next.has(key)) child.remove();
  parent.__children = next;
}

/** Return a list of facts, and a function that shows some: pairs of a name, and a text or elements. */
export function makeFacts(attributes = {}) {
  const list = make("dl", { class: "facts", ...attributes });
  const show = (pairs) =>
    reconcile(
      list,
      pairs.filter(([, value]) => value !== null && value !== ""),
      ([name]) => name,
      ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
      (row, [, value]) => setText(row.lastElementChild, value),
    );
  return [list, show];
}

/** Return a table with headings, and its body. `label` names it for screen readers. */
export function makeTable(label, headings) {
  const body = make("tbody");
  const cells = headings.map(([text, kind]) => make("th", { scope: "col", class: kind ?? null }, text));
  const table = make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, ...cells)), body);
  return [make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${label}, table` }, table), body];
}
