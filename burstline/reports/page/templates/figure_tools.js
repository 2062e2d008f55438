// Tools of each figure and command: a link to it, its drawing as SVG or PNG, its numbers as CSV, a copy button.
(() => {
  const save = (name, url) => Object.assign(document.createElement("a"), { download: name, href: url }).click();
  const dataUrl = (type, text) => `data:${type};charset=utf-8,${encodeURIComponent(text)}`;
  const copy = async (text, button) => {
    try { await navigator.clipboard.writeText(text); } catch {
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    const label = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  };
  const button = (text, title, act) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
    made.addEventListener("click", () => act(made));
    return made;
  };
  // Colours are CSS variables: a file of its own needs them written out.
  const drawing = (figure) => {
    const svg = [...figure.querySelectorAll("svg[viewBox]")].find((one) => one.getBoundingClientRect().width) ;
    const style = getComputedStyle(svg);
    const { width, height } = svg.viewBox.baseVal;
    const whole = svg.cloneNode(true);
    whole.querySelector(".crosshair")?.remove();
    const attributes = { xmlns: "http://www.w3.org/2000/svg", "xmlns:xlink": "http://www.w3.org/1999/xlink", width, height, "font-family": "system-ui, Helvetica, Arial, sans-serif" };
    for (const [name, value] of Object.entries(attributes)) whole.setAttribute(name, value);
    const text = new XMLSerializer().serializeToString(whole).replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    const paper = `<rect width="100%" height="100%" fill="${style.getPropertyValue("--paper").trim()}"/>`;
    return { text: text.replace(/^([^>]*>)/, `$1${paper}`), width, height };
  };
  const png = (figure, name) => {
    const { text, width, height } = drawing(figure);
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      save(name, canvas.toDataURL("image/png"));
    });
    image.src = dataUrl("image/svg+xml", text);
  };
  const csv = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => {
    const text = (cell.querySelector("button") ?? cell).firstChild?.textContent.trim() ?? "";
    return `"${text.replaceAll('"', '""')}"`;
  }).join(",")).join("\n");
  for (const figure of document.querySelectorAll("figure.plot")) {
    const svg = figure.querySelector("svg");
    const table = document.getElementById(svg.dataset.table) ?? figure.querySelector(".numbers table");
    const tools = Object.assign(document.createElement("div"), { className: "tools" });
    const link = Object.assign(document.createElement("a"), { href: `#${figure.id}`, textContent: "Link", title: "A link to this figure" });
    tools.append(
      link,
      button("SVG", "Save the drawing as SVG", () => save(`${figure.id}.svg`, dataUrl("image/svg+xml", drawing(figure).text))),
      button("PNG", "Save the drawing as PNG", () => png(figure, `${figure.id}.png`)),
    );
    if (table) tools.append(button("CSV", "Save the numbers as CSV", () => save(`${figure.id}.csv`, dataUrl("text/csv", csv(table)))));
    (figure.querySelector("details.numbers") ?? figure).append(tools);
  }
  for (const command of document.querySelectorAll(".command pre")) {
    command.before(button("Copy", "Copy this text", (made) => copy(command.textContent, made)));
  }
  const markdown = document.getElementById("markdown");
  if (markdown) document.getElementById("theme").before(button("Copy as Markdown", "Copy the summary for a pull request", (made) => copy(JSON.parse(markdown.textContent), made)));
})();
