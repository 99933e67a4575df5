// What the browser made of the page: a list of everything that is wrong, in words.
(() => {
  const wrong = [];
  const box = (element) => element.getBoundingClientRect();
  const name = (element) => `${element.tagName.toLowerCase()}.${element.getAttribute("class") || ""} "${element.textContent.slice(0, 40)}"`;
  const shown = (element) => element.checkVisibility() && box(element).width > 0;
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) wrong.push(`the page is ${document.documentElement.scrollWidth} px wide`);
  for (const element of document.querySelectorAll("main *")) {
    if (!shown(element) || element.closest(".scroll") || element.closest("svg")) continue;
    if (box(element).right > width + 0.5 || box(element).left < -0.5) wrong.push(`outside: ${name(element)}`);
    const style = getComputedStyle(element);
    if (style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1) wrong.push(`cut: ${name(element)}`);
  }
  const panels = document.querySelectorAll(".panel");
  if (panels.length !== 6) wrong.push(`${panels.length} panels`);
  for (const panel of panels) {
    if (box(panel).height < 80 || panel.innerText.trim().length < 40) wrong.push(`empty: ${name(panel)}`);
    const below = panel.nextElementSibling;
    if (below && below.classList.contains("panel") && box(below).top < box(panel).bottom) wrong.push(`overlaps: ${name(panel)}`);
  }
  for (const drawing of document.querySelectorAll("svg, .bar, .key i, .ramp i")) {
    if (shown(drawing) && (box(drawing).width < 10 || box(drawing).height < 10)) wrong.push(`too small: ${name(drawing)}`);
  }
  for (const labels of document.querySelectorAll(".xlabels, .ylabels")) {
    const boxes = [...labels.children].map(box);
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) wrong.push(`labels on labels: ${name(labels)}`);
    }));
    const panel = box(labels.closest(".panel"));
    if (boxes.some((b) => b.left < panel.left || b.right > panel.right)) wrong.push(`labels outside: ${name(labels)}`);
  }
  const light = (color) => {
    const [r, g, b] = color.match(/[\d.]+/g).map(Number).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/rgba\(.*, 0\)/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  for (const element of document.querySelectorAll("main *")) {
    if (!shown(element) || ![...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    if (element.closest("option")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(paper(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) wrong.push(`contrast ${((a + 0.05) / (b + 0.05)).toFixed(2)}: ${name(element)}`);
    if (parseFloat(getComputedStyle(element).fontSize) < 9) wrong.push(`tiny text: ${name(element)}`);
  }
  for (const control of document.querySelectorAll("select, input, summary")) {
    if (shown(control) && box(control).height < 30) wrong.push(`too small to tap: ${name(control)}`);
  }
  return wrong;
})()
