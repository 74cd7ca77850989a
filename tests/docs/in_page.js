// What test_browser.py runs in a page, before the page's own script.

const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));

/** Leave in the page all errors, and what a function returns. */
async function report(run, given) {
  const result = await run(given);
  const made = document.createElement("pre");
  made.id = "report";
  made.textContent = JSON.stringify([wrong, result]);
  document.body.append(made);
}

/** Compute all figures with all settings. */
function compute(all) {
  return all.map((s) => ({
    ring: course.ring(s.ranks),
    step: course.step(s),
    fit: course.fit(s),
    together: course.together({ ...s, tensor: 2, context: 2, bf16: true, again: s.checkpointing }),
    schedule: course.schedule(s.name, s.ranks, s.parts, s.backward),
  }));
}

/** Return the links found in files that a reader may choose. */
function links(files) {
  return files.map(course.readLink);
}

/** Return what cannot be seen on a page of slides. */
function unseen() {
  const found = [];
  document.querySelectorAll("section").forEach((slide, i) => {
    const all = slide.getBoundingClientRect();
    const scale = all.height / 720;
    for (const x of slide.querySelectorAll("*")) {
      const box = x.getBoundingClientRect();
      // The page number is in the lowest 40 pixels.
      const bottom = x.closest("header, footer") ? all.bottom : all.bottom - 40 * scale;
      const outside = box.left < all.left + 20 * scale || box.right > all.right - 20 * scale
        || box.top < all.top || box.bottom > bottom;
      const cut = x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display === "block";
      if (outside || cut) found.push(`slide ${i + 1}: ${x.tagName} ${x.textContent.slice(0, 40)}`);
    }
  });
  return found;
}

function slide(slider, value) {
  slider.value = value;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}

/** Guess, and move all that can be moved, as a reader does. Return what is not as it should be. */
function use() {
  document.querySelector("#ring svg").scrollIntoView(); // it begins to move when one sees it
  dispatchEvent(new Event("scroll")); // a busy browser says so later
  const label = document.querySelector("#ring [value=play]");
  const found = [];
  const check = (section, what, holds) => holds || found.push(`${section.id}: ${what}`);
  for (const section of document.querySelectorAll("section")) {
    const figure = section.querySelector("figure");
    check(section, "nothing is drawn before the guess", figure.querySelectorAll("svg rect").length > 9);
    const before = figure.textContent;
    const guess = section.querySelector(".guess");
    guess.elements.guess.value = 1;
    guess.elements.guess[0]?.click();
    guess.requestSubmit();
    const answer = section.querySelector("figcaption").textContent.match(/^.*?: (.*)\.$|(\d\S* \w+)/);
    if (section.id !== "schedule") check(section, "gives its answer away", !before.includes(answer[1] ?? answer[2]));
    check(section, "no verdict", /% low|too few|It's the same/.test(section.querySelector(".answer b").textContent));
    for (const slider of section.querySelectorAll(".slide")) {
      slider.scrollIntoView({ block: "end" });
      const [above, under] = [figure.getBoundingClientRect(), slider.getBoundingClientRect()];
      const beside = above.right < under.left || above.bottom < under.top;
      check(section, "out of sight while one moves a slider", beside && above.top >= -1);
      const [drawn, value] = [figure.innerHTML, slider.value];
      slide(slider, value > 0.5 ? 0 : 1);
      check(section, `${slider.ariaLabel} does nothing`, figure.innerHTML !== drawn);
      slide(slider, value);
      slider.scrollIntoView(); // as Shift+Tab does, from below
      const middle = slider.getBoundingClientRect();
      const top = document.elementFromPoint(middle.x + middle.width / 2, middle.y + middle.height / 2);
      check(section, `${slider.ariaLabel} is under the figure`, top === slider);
      const field = slider.parentElement.querySelector("[type=number]");
      const number = field.value;
      slider.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", cancelable: true }));
      const moved = slider.step === "0.005" ? field.value > Number(number) : true;
      check(section, `${slider.ariaLabel}: a key does nothing`, moved || value === "1");
      slide(slider, value);
    }
    for (const chosen of section.querySelectorAll("#fit select")) {
      const drawn = figure.innerHTML;
      chosen.selectedIndex = chosen.options.length > 3 ? 2 : 1;
      chosen.dispatchEvent(new Event("input", { bubbles: true }));
      check(section, `${chosen.name} does nothing`, figure.innerHTML !== drawn);
      const [above, under] = [figure.getBoundingClientRect(), chosen.getBoundingClientRect()];
      check(section, "out of sight while one chooses", above.right < under.left || above.top >= -1);
    }
    check(section, "wider than the screen", document.documentElement.scrollWidth <= innerWidth);
  }
  const schedule = document.querySelector("#schedule");
  schedule.querySelectorAll(".slide").forEach((slider) => slide(slider, 1));
  const passes = schedule.querySelectorAll("rect:not(.idle)");
  check(schedule, "a pass without its number", [...passes].every((pass) => pass.nextSibling));
  return [found, passes.length, label.textContent];
}
