// Shows what is known of the cell that is pointed at, tapped or chosen. The page says the same without it, less exactly.
"use strict";
const errors = {};
for (const tier of ["kept", "tail"]) {
  const found = document.querySelector(`#errors-${tier} script`);
  if (found) errors[tier] = JSON.parse(found.textContent);
}
function decibel(value) {
  return value === "=" ? "exact, no difference" : `${(value / 100).toFixed(2)} dB`;
}
for (const figure of document.querySelectorAll(".map")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area");
  const pick = figure.querySelector(".pick");
  const [layerBox, expertBox, output] = [pick.querySelector("select"), pick.querySelector("input"), pick.querySelector("output")];
  const cursor = area.appendChild(document.createElement("div"));
  const row = area.appendChild(document.createElement("div"));
  cursor.className = "cursor";
  row.className = "row";
  cursor.hidden = row.hidden = true;
  pick.hidden = false;

  const kept = (at, expert) => (parseInt(data.kept[at][expert >> 2], 16) >> (expert & 3)) & 1;
  function describe(at, expert) {
    const name = `layer ${data.layers[at]}, expert ${expert}: `;
    if (data.db === undefined) {
      const tier = kept(at, expert) ? "kept" : "tail";
      const found = errors[tier]?.db[errors[tier].layers.indexOf(data.layers[at])]?.[expert];
      const error = found === null || found === undefined ? "" : `, ${decibel(found)}`;
      return name + (tier === "kept" ? `kept, ${data.formats[at]}` : "tail, NF3") + error;
    }
    const value = data.db[at][expert];
    if (value === null || value === undefined) return name + "not quantised here in this tier";
    return name + decibel(value);
  }
  function show(at, expert) {
    layerBox.selectedIndex = at;
    expertBox.value = expert;
    const [w, h] = [100 / data.experts, 100 / data.layers.length];
    cursor.style.cssText = `left:${expert * w}%;top:${at * h}%;width:${w}%;height:${h}%`;
    row.style.cssText = `top:${at * h}%;height:${h}%`;
    cursor.hidden = row.hidden = false;
    output.textContent = describe(at, expert);
  }
  function point(event) {
    const box = area.getBoundingClientRect();
    const cell = (part, whole, count) => Math.min(count - 1, Math.max(0, Math.floor((part / whole) * count)));
    show(
      cell(event.clientY - box.top, box.height, data.layers.length),
      cell(event.clientX - box.left, box.width, data.experts),
    );
  }
  function chosen() {
    const expert = Math.min(data.experts - 1, Math.max(0, Math.trunc(Number(expertBox.value)) || 0));
    show(layerBox.selectedIndex, expert);
  }
  area.addEventListener("pointermove", (event) => event.pointerType === "mouse" && point(event));
  area.addEventListener("click", point);
  layerBox.addEventListener("change", chosen);
  expertBox.addEventListener("change", chosen);
}
